#include "load.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>

/* Serves tunnels for ever: TCP, or with `h2` HTTP/2, or with `tls` HTTP/2 over TLS. */
void serve(int listener, SSL_CTX *tls, bool h2)
{
    struct epoll_event events[256], event = {.events = EPOLLIN, .data.ptr = NULL};
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        flush_dirty();
        int ready = epoll_wait(poller, events, 256, -1);
        if (ready < 0 && errno != EINTR)
            die("epoll: %s", strerror(errno));
        for (int i = 0; i < ready; i++) {
            if (events[i].data.ptr)
                conn_event(events[i].data.ptr, events[i].events);
            else
                while (accept_conn(listener, tls, h2))
                    ;
        }
    }
}

int main(int argc, char **argv)
{
    struct rlimit files;
    signal(SIGPIPE, SIG_IGN);
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    poller = epoll_create1(EPOLL_CLOEXEC);
    if (argc > 2 && !strcmp(argv[1], "client"))
        return client_main(argc - 1, argv + 1);
    if (argc >= 4 && !strcmp(argv[1], "serve")) {
        char bound[80];
        bool h2 = !strcmp(argv[3], "h2"), tls = !strcmp(argv[3], "tls");
        if (!h2 && !tls && strcmp(argv[3], "tcp"))
            die("serves tcp, h2 or tls");
        if (argc == 5 || argc == 7)
            stream_window = connection_window = (uint32_t)strtoul(argv[argc - 1], NULL, 10);
        SSL_CTX *context = tls && argc >= 6 ? server_tls(argv[4], argv[5]) : NULL;
        if (tls && !context)
            die("tls needs CERTIFICATE KEY");
        int listener = listen_on(argv[2], bound, sizeof bound);
        printf("{\"listening\": \"%s\"}\n", bound);
        fflush(stdout);
        serve(listener, context, h2 || tls);
    }
    if (argc == 5 && !strcmp(argv[1], "delay")) {
        char bound[80];
        int listener = listen_on(argv[2], bound, sizeof bound);
        printf("{\"listening\": \"%s\"}\n", bound);
        fflush(stdout);
        delay(listener, argv[3], atof(argv[4]));
    }
    fputs("usage: load serve HOST:PORT tcp|h2|tls [CERTIFICATE KEY] [WINDOW_BYTES]\n"
          "       load delay HOST:PORT TO_HOST:PORT ONE_WAY_MS\n"
          "       load client --to HOST:PORT [--h2] [--hello FILE] [--tunnels N] open|rr|bulk|hold ...\n",
          stderr);
    return 2;
}
