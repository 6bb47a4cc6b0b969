"""`smartgen doctor`: what this machine lacks for SmartGen, line by line, each with its mend.

Nothing is changed and no server is started. Exit code 0 when there is no error, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.text import Text

from sglang_smartgen.report import (
    doctor_files,
    doctor_loopback,
    doctor_machine,
    doctor_probe,
    doctor_versions,
)
from sglang_smartgen.report.findings import Check, Finding, guarded

STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--smartgen-config", default="", help="check this JSON text or JSON file")
    parser.add_argument("--artifact", default="", help="check this file of `smartgen calibrate`")
    parser.add_argument("--profile", default="", help="check this file of `smartgen profile`")
    parser.add_argument("--model", default="", help="model folder to compare them with")
    parser.add_argument(
        "--ports",
        default=",".join(map(str, doctor_machine.DEFAULT_PORTS)),
        type=_ports,
        help="ports that the servers will use (default: %(default)s)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="leave out what takes long: SGLang's import, the GPU and the transport's self-test",
    )
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")


def run(args: argparse.Namespace) -> int:
    """Make every check and show it; 1 when one found an error."""
    findings: list[Finding] = []
    terminal = args.format == "terminal"
    out = Console(soft_wrap=True, highlight=False)
    out.file = sys.stdout  # as it is now: below a library's prints go to stderr
    with contextlib.redirect_stdout(sys.stderr):
        for finding in _findings(args):
            findings.append(finding)
            if terminal:
                _show(out, finding)
    failed = any(finding.state == "error" for finding in findings)
    if terminal:
        counts = {state: sum(f.state == state for f in findings) for state in STYLES}
        print(", ".join(f"{n} {state}" for state, n in counts.items()))
    else:
        report = {"ok": not failed, "findings": msgspec.to_builtins(findings)}
        print(json.dumps(report), flush=True)
    return 1 if failed else 0


def checks(args: argparse.Namespace) -> list[tuple[str, Check]]:
    """Every check with the section that its failure is shown in; what takes long comes last."""
    files = doctor_files.Files(args.smartgen_config, args.artifact, args.profile, args.model)
    quick: list[tuple[str, Check]] = [
        ("versions", doctor_versions.check),
        ("machine", doctor_machine.check_cores),
        ("machine", doctor_machine.check_limits),
        ("network", doctor_machine.check_rdma),
        ("network", doctor_machine.check_network),
        ("network", doctor_machine.check_token),
        ("ports", functools.partial(doctor_machine.check_ports, args.ports)),
        ("files", functools.partial(doctor_files.check, files)),
    ]
    if args.quick:
        return quick
    return [*quick, ("transport", doctor_loopback.check), ("hooks", doctor_probe.check)]


def _findings(args: argparse.Namespace) -> Iterator[Finding]:
    progress = Console(stderr=True)
    for section, check in checks(args):
        with progress.status(f"looking at {section}"):
            found = list(guarded(section, check))
        yield from found


def _show(out: Console, finding: Finding) -> None:
    line = Text()
    line.append(f"{finding.state:<8}", STYLES[finding.state])
    line.append(f"{finding.section}: {finding.name}: {finding.text}")
    if finding.mend:
        line.append(f"\n        -> {finding.mend}", "dim")
    out.print(line)


def _ports(text: str) -> tuple[int, ...]:
    """Ports from `30000,8998`; argparse shows the sentence of an ArgumentTypeError."""
    try:
        ports = tuple(int(part) for part in text.split(","))
    except ValueError:
        ports = ()
    if not ports or not all(0 < port < 65536 for port in ports):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of ports; allowed are numbers from 1 to 65535, with commas"
        )
    return ports
