"""The help of every command: fast, and with every option described."""

import json
import subprocess
import sys

import click
import pytest
import typer
from typer.testing import CliRunner

from vit_memory.cli import app

EVERY_HELP = """
import json, sys
import typer
from typer.testing import CliRunner
from vit_memory.cli import app

def paths(command, path=()):
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from paths(child, (*path, name))

for path in paths(typer.main.get_command(app)):
    assert CliRunner().invoke(app, [*path, "--help"]).exit_code == 0, path
print(json.dumps(sorted({"torch", "numpy", "PIL"} & set(sys.modules))))
"""


def commands(command=None, path=()):
    command = command or typer.main.get_command(app)
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def test_the_help_of_every_command_waits_for_no_library():
    result = subprocess.run([sys.executable, "-c", EVERY_HELP], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == []


@pytest.mark.parametrize(("path", "command"), [pytest.param(p, c, id=" ".join(p)) for p, c in commands() if p])
def test_every_command_and_option_is_described(path, command):
    assert command.help
    if path != ("train",):
        assert [parameter.name for parameter in command.params if not parameter.help] == []


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "t", "--data", "d", "--split", "dev"],
        ["evaluate", "t", "--data", "d", "--on-bad-image", "ignore"],
        ["predict", ".", "--bundle", "t", "--format", "xml"],
        ["data", "digits", "--check", "all"],
        ["data", "digits", "--kind", "other"],
    ],
)
def test_an_unknown_word_is_a_usage_error_that_lists_the_words(words):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert f"{words[-1]!r} is not one of" in click.unstyle(result.output)
