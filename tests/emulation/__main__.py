# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.emulation`: build, use and fill the emulated Arm server."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from . import rig
from .cache import default_cache
from .cpu_models import CPU_MODELS
from .guest import DEFAULT_CPU, ArmRoot, parse_bind, parse_env
from .install import install_wheels
from .pins import REQUIREMENTS_DIRECTORY


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.emulation", description=__doc__)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--cache",
        type=Path,
        default=default_cache(),
        help="where roots are kept (default: $VLLM_ARM_CACHE/arm-root, else %(default)s)",
    )
    shared.add_argument(
        "--requirements",
        type=Path,
        default=REQUIREMENTS_DIRECTORY,
        metavar="DIR",
        help="folder of core.txt, vllm.txt and test.txt (default: the repository's)",
    )
    shared.add_argument("--mirror", metavar="URI", help="Debian archive (default: as apt has it)")
    shared.add_argument(
        "--usr-local",
        type=Path,
        metavar="DIR",
        help="host folder that is the guest's /usr/local (default: CACHE/usr-local)",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("make-root", parents=[shared], help="build the root, or reuse it; prints its path")
    commands.add_parser("root-path", parents=[shared], help="print the root's path; an error when it is not built")
    run = commands.add_parser("run", parents=[shared], help="run a command in the root")
    models = "; ".join(f"{model.name}: {model.description}" for model in CPU_MODELS.values())
    run.add_argument("--cpu", choices=list(CPU_MODELS), default=DEFAULT_CPU, help=models)
    run.add_argument("--env", action="append", default=[], metavar="K[=V]", help="set a variable, or pass it on")
    run.add_argument(
        "--bind",
        action="append",
        default=[],
        metavar="HOST:GUEST[:ro]",
        help="show a host file or folder in the guest",
    )
    run.add_argument("--cwd", default="/", help="working directory in the guest")
    run.add_argument("--nodes", type=int, default=1, help="NUMA nodes to show (default 1)")
    run.add_argument(
        "--midr",
        type=lambda text: int(text, 0),
        help="MIDR_EL1 to show in /sys (default: the CPU model's)",
    )
    run.add_argument("--shm-size", default="50%", help="size of /dev/shm (default %(default)s)")
    run.add_argument("argv", nargs="+", metavar="COMMAND", help="the command, after --")
    install = commands.add_parser("install", parents=[shared], help="install wheels into the guest's /usr/local")
    install.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; errors are one line on stderr and exit code 2."""
    # An ordinary exit, so that a half-built root is cleared away.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    options = build_parser().parse_args(arguments)
    usr_local = options.usr_local or options.cache / "usr-local"
    try:
        if options.command == "install":
            install_wheels(options.wheels, usr_local)
            return 0
        if options.command == "root-path":
            print(rig.existing_root(options.cache, options.requirements))
            return 0
        root = rig.make_root(options.cache, options.requirements, options.mirror)
        if options.command == "make-root":
            print(root)
            return 0
        ArmRoot(root, usr_local).exec(
            options.argv,
            cpu=options.cpu,
            env=parse_env(options.env),
            binds=[parse_bind(bind) for bind in options.bind],
            cwd=options.cwd,
            nodes=options.nodes,
            midr=options.midr,
            shm_size=options.shm_size,
        )
    except (OSError, LookupError, RuntimeError, ValueError) as error:
        print(f"arm root: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
