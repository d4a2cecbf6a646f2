"""The command line explains itself: every verb has help, an example that parses, and a place in shell completion."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import typer

import drafttrain
from drafttrain.cli import app

GROUP = typer.main.get_command(app)
VERBS = sorted(GROUP.commands)


def examples(verb: str) -> list[str]:
    """The example lines of a verb's help, as they are written."""
    return re.findall(r"^\s*Example: (drafttrain .*)$", GROUP.commands[verb].help, flags=re.MULTILINE)


def parse(line: str) -> dict:
    """{parameter: value} of a command line as the verb itself reads it. Ends with SystemExit or a usage error where a
    verb or an option does not exist, or a value is of another type.
    """
    _, verb, *arguments = shlex.split(line)
    command = GROUP.commands[verb]
    return command.make_context(verb, arguments).params


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_an_example_that_parses(verb):
    lines = examples(verb)
    assert lines, f"{verb}: no line `Example: drafttrain {verb} ..` in its help"
    for line in lines:
        assert shlex.split(line)[1] == verb
        assert parse(line)


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_explained(verb):
    silent = [
        p.name for p in GROUP.commands[verb].params if p.param_type_name == "option" and not p.help and p.name != "help"
    ]
    assert not silent


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("drafttrain evaluate checkpoints/demo --kk 3", "o such option: --kk"),
        ("drafttrain generate checkpoints/demo x --k three", "valid integer"),
        ("drafttrain publish checkpoints/demo", "Missing parameter: to"),
        ("drafttrain check", "Missing parameter: draft"),
        ("drafttrain compare", "Missing parameter: sources"),
    ],
)
def test_an_example_that_does_not_parse_is_seen(line, message):
    with pytest.raises(Exception, match=re.escape(message)) as caught:
        parse(line)
    assert caught.value.exit_code == 2


def test_the_first_page_names_every_verb(cli):
    status, out, _ = cli("--help")
    assert status == 0
    assert [verb for verb in VERBS if not re.search(rf"^[ │|]+{verb} ", out, flags=re.MULTILINE)] == []


def test_help_of_a_verb_shows_its_example(cli):
    status, out, _ = cli("publish", "--help")
    assert status == 0 and "Example: drafttrain publish checkpoints/demo --to" in " ".join(out.split())


def test_a_wrong_word_ends_with_the_next_command(cli):
    for words in (["evaluat", "x"], ["evaluate", "x", "--kk", "3"]):
        status, _, err = cli(*words)
        assert status == 2 and re.search(r"Try 'drafttrain .*--help' for help", err), err


def test_errors_of_the_command_line_say_what_to_do():
    """Each one that its modules raise says what was expected, or the mend."""
    bare = []
    for path in sorted(Path(drafttrain.__file__).parent.glob("cli*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                parts = [part.value for part in ast.walk(node.exc.args[0]) if isinstance(part, ast.Constant)]
                words = "".join(part for part in parts if isinstance(part, str))
                if words and not re.search("Mend: |expected|Expected", words):
                    bare.append(f"{path.name}:{node.lineno}")
    assert bare == []


def test_version(cli):
    assert cli("--version") == (0, f"drafttrain {drafttrain.__version__}\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_printed(cli, monkeypatch, shell):
    monkeypatch.setenv("_DRAFTTRAIN_COMPLETE", f"source_{shell}")  # --show-completion does so for the shell it runs in.
    status, out, _ = cli()
    assert status == 0 and "_DRAFTTRAIN_COMPLETE=complete_" + shell in out


def test_completion_knows_verbs_and_options(cli, monkeypatch):
    monkeypatch.setenv("_DRAFTTRAIN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "drafttrain pub")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert cli()[1].split() == ["publish"]
    monkeypatch.setenv("COMP_WORDS", "drafttrain publish --dr")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert cli()[1].split() == ["--dry-run"]
