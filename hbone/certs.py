"""`hbone certs`: the certificate, the key and the CA certificates in a folder, and what is wrong with
them."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from typing import Any

from shared.credentials.certificates.certificate_report import describe_all, until
from shared.errors import EXIT_CONFIG, EXIT_OK
from shared.net.tls import certificate_check, certificate_folder
from shared.net.tls.certificate_check import Findings
from shared.net.tls.certificate_folder import CertificatePaths


def run(options: argparse.Namespace) -> int:
    """Prints what is in the folder; returns the exit code, EXIT_CONFIG if something is wrong with it."""
    paths = certificate_folder.find(options.folder or certificate_folder.customary_folder())
    now = datetime.now(UTC)
    found = certificate_check.read(paths, now)
    report = _report(paths, found, now)
    if options.folder is None and not paths.count:
        folders = ", ".join(map(str, certificate_folder.FOLDERS))
        report["faults"].append(f"no certificates in any of {folders}: name their FOLDER")
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(_lines(report)))
    return EXIT_CONFIG if found.faults else EXIT_OK


def _report(paths: CertificatePaths, found: Findings, now: datetime) -> dict[str, Any]:
    return {
        "files": {
            "certificates": str(paths.certificates),
            "private_key": str(paths.private_key),
            "roots": str(paths.roots),
        },
        "private_key": {"kind": found.key_kind, "matches": found.key_matches},
        **describe_all(found.chain, found.roots, now, found.bundles),
        "chain_fault": found.chain_fault,
        "faults": list(found.faults),
    }


def _lines(report: dict[str, Any]) -> list[str]:
    lines = []
    files, key = report["files"], report["private_key"]
    for depth, one in enumerate(report["cert_chain"]):
        lines += [
            f"certificate  {files['certificates']}" if depth == 0 else "issued by",
            f"  identity   {one['identity'] or '-'}",
            f"  subject    {one['subject'] or '-'}",
            f"  issuer     {one['issuer'] or '-'}",
            f"  serial     {one['serial']}",
            f"  valid      {one['not_before']} to {one['not_after']}, {until(one['remaining_s'])}",
            f"  key        {one['key']}",
        ]
    if key["kind"]:
        lines += [f"key          {files['private_key']}", f"  kind       {key['kind']}{_whose(report)}"]
    if report["ca_cert"]:
        lines.append(f"roots        {files['roots']}")
    for root in report["ca_cert"]:
        domain = f", trust domain {root['trust_domain']}" if root["trust_domain"] else ""
        valid = f"until {root['not_after']}, {until(root['remaining_s'])}"
        lines.append(f"  root       {root['subject'] or '-'}{domain}, {valid}")
    if report["chain_fault"]:
        lines.append(f"note         the chain leads to none of these roots: {report['chain_fault']}")
    return lines + [f"fault        {fault}" for fault in report["faults"]]


def _whose(report: dict[str, Any]) -> str:
    """Whether the key is that of the first certificate, as text; empty without a certificate."""
    if not report["cert_chain"]:
        return ""
    return ", the certificate's" if report["private_key"]["matches"] else ", NOT the certificate's"
