"""Command line of `train`.

Commands are looked up by name and imported when called, so that `train --help` needs no torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from prep.files import print_any_path, shown
from train.recipes import recipe_flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One subcommand: where its options and its function live, and what `--help` says."""

    options: str
    """`module:class` of the options' dataclass, light to import."""
    run: str
    """`module:function`, called with the options and a function that prints a line."""
    summary: str


COMMANDS = {
    "fit": Command(
        options="train.config:FitConfig",
        run="train.launch:launch",
        summary="train a ResNet from shards, or from a raw folder to compare",
    ),
    "eval": Command(
        options="train.options:EvalConfig",
        run="train.evaluation:evaluate_checkpoint",
        summary="top-1 and top-5 of a checkpoint",
    ),
    "predict": Command(
        options="train.options:PredictConfig",
        run="train.predict:predict",
        summary="name what is on pictures",
    ),
    "export": Command(
        options="train.options:ExportConfig",
        run="train.export:export",
        summary="write a network for other programs",
    ),
    "plot": Command(
        options="train.options:PlotConfig",
        run="train.plot:plot",
        summary="draw the logs of one run or several",
    ),
    "bench": Command(
        options="train.options:BenchConfig",
        run="train.bench:bench",
        summary="loader throughput: the raw folder, webdataset and shards, in turn",
    ),
    "demo": Command(
        options="train.options:DemoConfig",
        run="train.demo:demo",
        summary="two minutes from a folder with damaged files to a trained network",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 fine, 1 failure, 2 wrong use.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    name = arguments[0]
    if name not in COMMANDS:
        print(f"train: unknown command {name!r}; one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    try:
        options = parse_options(name, _look_up(command.options), arguments[1:])
    except SystemExit as ended:  # tyro has printed the help or what is wrong
        return 2 if ended.code else 0
    return _run(name, command, options)


def entry() -> None:
    """Start from the installed `train` program."""
    print_any_path()
    sys.exit(main())


def parse_options(name: str, options: type[Any], arguments: Sequence[str]) -> Any:
    """Read the flags of a command; a recipe gives defaults, and any flag beside it wins.

    Raises:
        SystemExit: 0 after `--help`, 2 after wrong flags, each with its text printed.
    """
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    peek.add_argument("--recipe", nargs="?", default="")
    recipe = peek.parse_known_args(arguments)[0].recipe or ""
    return tyro.cli(
        options,
        prog=f"train {name}",
        args=[*recipe_flags(recipe), *arguments],
        config=(tyro.conf.DisallowNone,),
    )


def _run(name: str, command: Command, options: Any) -> int:
    run: Callable[[Any, Callable[[str], None]], object] = _look_up(command.run)
    interrupted: type[Exception] = _look_up("train.stop:Interrupted")
    try:
        run(options, _say)
    except (ValueError, OSError, interrupted) as error:
        print(f"train {name}: {_one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"train {name}: interrupted", file=sys.stderr)
        return 1
    return 0


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    usage = "usage: train COMMAND [OPTIONS]\n\ncommands:\n"
    return usage + "\n".join(lines) + "\n\n`train COMMAND --help` lists a command's options."


def _look_up(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _one_line(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, OSError) and isinstance(error.filename, str):
        text = f"{shown(Path(error.filename))}: {error.strerror}"
    return " ".join(text.split()) or type(error).__name__


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    entry()
