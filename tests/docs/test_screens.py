"""Every command in docs/ runs and prints what its page shows; links and paths lead somewhere."""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path

import pytest

from docs import screens
from headway.commands.main import COMMANDS as commands
from tests.architecture.tree import tracked_files, tracked_product_files
from tests.commands.running import run
from tests.distributed import launching
from tests.waiting import IS_LONG

ROOT = Path(__file__).resolve().parents[2]


def printed_by(command: str, stage: Path) -> str:
    """Return the output of a command of a page, in this process if it starts no other."""

    def execute(words: list[str], environ: dict[str, str], folder: Path) -> str:
        if "--dry-run" in words or words[3] in ("adopt", "config", "doctor", "env"):
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                for name in ("HOME", "XDG_CONFIG_HOME"):
                    patch.setenv(name, environ[name])
                return run(*words[3:])[1]
        environ = environ | {"PYTHONPATH": launching.environment()["PYTHONPATH"]}
        done = launching.run(
            words, environ, timeout_s=screens.TIMEOUT_S, cwd=folder, stderr=subprocess.STDOUT
        )
        return done.stdout

    return screens.run(command, stage, execute)


COMMANDS = [
    (page.name, screen[0], screen[1])
    for page in screens.PAGES
    for screen in screens.SCREEN.finditer(page.read_text())
]


@pytest.mark.distributed
@pytest.mark.usefixtures("warm_pythons", "torch_asked_once")
@pytest.mark.parametrize(("page", "shown", "command"), COMMANDS, ids=lambda word: word[:60])
def test_a_page_shows_what_a_command_prints(
    page: str, shown: str, command: str, tmp_path: Path
) -> None:
    if command.startswith(("headway estimate ", "headway test ")) and not IS_LONG:
        pytest.skip("the long form; runs with --long")  # other tests show it, on smaller models
    stage = tmp_path / "stage"
    stage.mkdir()
    screens.make_stage(stage)
    printed = printed_by(command, stage)
    assert printed.strip()
    assert "Traceback" not in printed
    if all((stage / word).exists() for word in command.split() if word.endswith(".py")):
        assert ("error:" in printed) == ("error:" in shown), printed
    if re.search("--machine|--devices|adopt", command):  # the same on all machines
        lines = same_anywhere(f"```console\n$ {command}\n{printed}```")
        if screens.ELIDED.search(shown):
            lines = [one for one in same_anywhere(shown) if one in [*lines, "...", "  ..."]]
        assert same_anywhere(shown) == lines, f"run docs/screens.py ({page})"


def same_anywhere(screen: str) -> list[str]:
    """Return the lines but those about this machine; columns are as wide as its paths ask for."""
    of_this_machine = ("headway: waiting for", "note: this kernel")
    lines = [line for line in screen.splitlines() if not line.startswith(of_this_machine)]
    return [re.sub(r"  +", "  ", line) for line in lines]


def test_the_training_page_lists_names_that_exist() -> None:
    import headway
    from headway import Accelerator, logging, state, utils

    page = (ROOT / "docs" / "reference" / "training.md").read_text()
    table = page.partition("| prepare and train |")[2].partition("\n\n")[0]
    names = {name.split(".")[-1] for name in re.findall(r"`([\w.]+)", table)}
    homes = (headway, Accelerator(cpu=True), state, utils, logging)
    assert len(names) > 20
    unknown = {name for name in names if not any(hasattr(home, name) for home in homes)}
    assert not unknown - {*inspect.signature(Accelerator).parameters}


def test_the_pages_have_screens_and_name_only_commands_that_exist() -> None:
    assert len(COMMANDS) > 5
    for page in screens.PAGES:
        for name in re.findall(r"`headway (\w+)", page.read_text()):
            assert name in commands, f"{page.name} names `headway {name}`"


def test_a_screen_that_is_elided_or_lacks_its_script_stays(tmp_path: Path) -> None:
    screens.make_stage(tmp_path)
    ran: list[str] = []

    def run(command: str, _: Path) -> str:
        ran.append(command)
        return "new\n"

    pages = {page: page.read_text() for page in screens.PAGES}
    made = {page: screens.updated(text, tmp_path, run) for page, text in pages.items()}
    stay = {command for _, _, command in COMMANDS} - {*ran}
    scripts = {word for command in stay for word in command.split() if word.endswith(".py")}
    assert scripts == {"sft.py", "train.py", "train_with_accelerate.py", "train_with_trainer.py"}
    for page, text in pages.items():
        for screen in screens.SCREEN.finditer(text):
            assert (screen[0] in made[page]) == (screen[1] in stay)


OUTSIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "llms.txt")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:[\w-]+/)+(?!NAME\.)[\w-]+\.(?:py|md|ipynb|txt|svg))`")
PAGE = re.compile(r"\bdocs/[\w/-]+\.md")


def anchors(page: Path) -> set[str]:
    """Return the fragments of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", [*OUTSIDE, *screens.PAGES], ids=lambda page: page.name)
def test_links_lead_to_files_of_the_tree_and_to_headings(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if re.match(r"https?:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def test_files_that_pages_name_are_there() -> None:
    tracked = [f"/{name}" for name in tracked_files()]
    for page in (*OUTSIDE, *screens.PAGES):
        for named in NAMED.findall(page.read_text()):
            assert any(name.endswith(f"/{named}") for name in tracked), f"{page.name}: {named}"


def test_messages_name_no_page_because_a_wheel_has_none() -> None:
    named = {name for path in tracked_product_files() for name in PAGE.findall(path.read_text())}
    assert PAGE.findall("see docs/guides/sharding.md")
    assert not named


def test_the_readme_and_the_guides_are_short() -> None:
    pages = [OUTSIDE[0], *(page for page in screens.PAGES if page.parent.name == "guides")]
    assert not [page.name for page in pages if len(page.read_text().splitlines()) > 120]
