#!/bin/sh
# Builds h2spec, the conformance test of HTTP/2, from the Go module proxy: build_h2spec.sh [FOLDER]
#
# Leaves FOLDER/h2spec (default: .venv/bin of this checkout) and prints its path; does nothing when it is
# there already. What goes wrong ends it with one line on standard error and exit code 69, as in our commands.
set -eu

VERSION=2.6.0
COMMIT=70ac22940108
# The release's go.mod names no /v2, so the proxy cannot serve it as v2.6.0; its commit has this name there.
MODULE=github.com/summerwind/h2spec
MODULE_VERSION=v0.0.0-20200804131034-$COMMIT

fail() {
    echo "build_h2spec: $1" >&2
    exit 69 # EX_UNAVAILABLE
}

root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$root/.venv/bin}
mkdir -p "$folder"
binary=$(cd "$folder" && pwd)/h2spec

if [ -x "$binary" ] && [ "$("$binary" --version 2>&1)" = "Version: $VERSION ($COMMIT)" ]; then
    echo "$binary"
    exit 0
fi
command -v go >/dev/null || fail "go is not on PATH: install Go 1.18 or later (https://go.dev/dl)"

work=$(mktemp -d)
trap 'rm -rf "$work" "$binary.$$"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# A module of our own around it, with the release's own dependencies, because `go install PACKAGE@VERSION`
# would ask yet another host for the checksums.
cat >"$work/go.mod" <<END
module conformance

go 1.17

require (
	github.com/fatih/color v0.0.0-20161025120501-bf82308e8c85 // indirect
	github.com/inconshreveable/mousetrap v1.0.0 // indirect
	github.com/mattn/go-colorable v0.1.0 // indirect
	github.com/mattn/go-isatty v0.0.4 // indirect
	github.com/spf13/cobra v0.0.0-20170118185516-dc208f4211e7 // indirect
	github.com/spf13/pflag v1.0.3 // indirect
	$MODULE $MODULE_VERSION
	golang.org/x/net v0.0.0-20161104230106-55a3084c9119 // indirect
	golang.org/x/sys v0.0.0-20190209173611-3b5209105503 // indirect
)
END
cat >"$work/go.sum" <<END
github.com/fatih/color v0.0.0-20161025120501-bf82308e8c85 h1:g7ijd5QIEMWwZNVp/T/6kQ8RSh8rN+YNhghMcrET3qY=
github.com/fatih/color v0.0.0-20161025120501-bf82308e8c85/go.mod h1:Zm6kSWBoL9eyXnKyktHP6abPY2pDugNf5KwzbycvMj4=
github.com/inconshreveable/mousetrap v1.0.0 h1:Z8tu5sraLXCXIcARxBp/8cbvlwVa7Z1NHg9XEKhtSvM=
github.com/inconshreveable/mousetrap v1.0.0/go.mod h1:PxqpIevigyE2G7u3NXJIT2ANytuPF1OarO4DADm73n8=
github.com/mattn/go-colorable v0.1.0 h1:v2XXALHHh6zHfYTJ+cSkwtyffnaOyR1MXaA91mTrb8o=
github.com/mattn/go-colorable v0.1.0/go.mod h1:9vuHe8Xs5qXnSaW/c/ABM9alt+Vo+STaOChaDxuIBZU=
github.com/mattn/go-isatty v0.0.4 h1:bnP0vzxcAdeI1zdubAl5PjU6zsERjGZb7raWodagDYs=
github.com/mattn/go-isatty v0.0.4/go.mod h1:M+lRXTBqGeGNdLjl/ufCoiOlB5xdOkqRJdNxMWT7Zi4=
github.com/spf13/cobra v0.0.0-20170118185516-dc208f4211e7 h1:/xfSxzUJXZPhOsBj5aCUvA3mOIc7ILcvvJpmvzhQk7w=
github.com/spf13/cobra v0.0.0-20170118185516-dc208f4211e7/go.mod h1:1l0Ry5zgKvJasoi3XT1TypsSe7PqH0Sj9dhYf7v3XqQ=
github.com/spf13/pflag v1.0.3 h1:zPAT6CGy6wXeQ7NtTnaTerfKOsV6V6F8agHXFiazDkg=
github.com/spf13/pflag v1.0.3/go.mod h1:DYY7MBk1bdzusC3SYhjObp+wFpr4gzcvqqNjLnInEg4=
$MODULE $MODULE_VERSION h1:ecwW3RnjsJlnVZkvXHaxa+Hg0EW+6KF8mFovyFk+WZA=
$MODULE $MODULE_VERSION/go.mod h1:jn/HqC28P+sr5C23xwQQyRzsvJPpWnPGX20sJKIJIwE=
golang.org/x/net v0.0.0-20161104230106-55a3084c9119 h1:T/FVHYSpR0pXqxZ6zNrRnmk4iHorxWyidE9VCMGJ5rQ=
golang.org/x/net v0.0.0-20161104230106-55a3084c9119/go.mod h1:mL1N/T3taQHkDXs73rZJwtUhF3w3ftmwwsq0BUmARs4=
golang.org/x/sys v0.0.0-20190209173611-3b5209105503 h1:5SvYFrOM3W8Mexn9/oA44Ji7vhXAZQ9hiP+1Q/DMrWg=
golang.org/x/sys v0.0.0-20190209173611-3b5209105503/go.mod h1:STP8DvDyc/dI5b8T5hshtkjS+E42TnysNCUPdjciGhY=
END

# Static, and whatever the caller's own Go settings are.
(cd "$work" && CGO_ENABLED=0 GO111MODULE=on GOWORK=off GOFLAGS=-mod=readonly go build -trimpath \
    -ldflags "-s -w -X main.VERSION=$VERSION -X main.COMMIT=$COMMIT" -o "$binary.$$" "$MODULE/cmd/h2spec") \
    >"$work/said" 2>&1 ||
    fail "h2spec $VERSION cannot be built: $(tail -n 1 "$work/said")"
mv "$binary.$$" "$binary" # in one step: two builds at once do no harm
echo "$binary"
