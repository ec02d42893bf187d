"""The site is built without a warning, and what pages and README tell people to type runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from docs import errors, reference, screens
from headway.commands import explain
from headway.ipc.origin import Layer
from headway.settings.profile import parse_profile
from headway.settings.table import TABLE
from tests.distributed.launching import HEADWAY, environment, launch, run, script
from tests.docs import test_screens
from tests.docs.test_screens import ROOT, printed_by

BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
TESTED = {"sh", "console", "python", "yaml"}
SHOWN = {"", "diff", "walk", "files"}  # output, and what tests/architecture compares
PAGES = [ROOT / "README.md", *screens.PAGES]
OWN_COMMANDS = re.compile(r"headway |pip install ")


def blocks(language: str) -> list[tuple[str, str]]:
    """Return the page and the text of each block in this language."""
    found = [(page.name, *match) for page in PAGES for match in BLOCK.findall(page.read_text())]
    return [(page, text) for page, item, _, text in found if item == language]


@pytest.mark.processes
def test_the_site_is_built_without_a_warning_and_needs_no_other_server(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr

    pages = {str(path.relative_to(site)): path.read_text() for path in site.rglob("*.html")}
    for text in pages.values():
        remote = (
            r"""<(?:script|img|iframe)[^>]+src=["']?(?:https?:)?//|<link[^>]+stylesheet[^>]+//"""
        )
        assert not re.search(remote, text)
    assert all(f'id="{name}"' in pages["reference/settings.html"] for name in TABLE)
    assert 'id="headway.accelerator.Accelerator.prepare"' in pages["reference/python.html"]


def test_every_setting_is_in_its_reference() -> None:
    page = reference.settings_page()
    for row in TABLE.values():
        assert f"## {row.name}\n" in page
        assert f"`{row.variable}`" in page


def test_the_commands_of_the_page_of_errors_print_their_ids() -> None:
    pages = [page for page in explain.read_pages().values() if errors.command_of(page)]
    assert len(pages) > 30
    with errors.stage():
        for page in pages:
            assert f" [{page.id}]\n" in errors.printed_by(page)[1]


RAISING = """
import json, sys, torch
from headway import Accelerator, replace_accelerate
from headway.state import AcceleratorState
raised = {}
for id, example in json.loads(sys.argv[1]).items():
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loss = model(torch.ones(2)).sum()
    try:
        exec(example)
    except Exception as error:
        raised[id] = str(error)
print(json.dumps(raised))
"""


@pytest.mark.processes
def test_the_python_examples_of_errors_raise_them(tmp_path: Path) -> None:
    examples = {
        page.id: page.example.strip("`")
        for page in explain.read_pages().values()
        if re.fullmatch("`[^`]+`", page.example) and not errors.command_of(page)
    }
    assert len(examples) > 10
    words = [sys.executable, "-c", RAISING, json.dumps(examples)]
    raised = json.loads(run(words, environment(), cwd=tmp_path, timeout_s=120, code=0).stdout)
    for id, example in examples.items():
        assert f" [{id}]\n" in raised.get(id, ""), (example, raised.get(id))


def test_blocks_are_in_languages_that_a_test_runs_or_that_only_show() -> None:
    for page in PAGES:
        languages = {language for language, _, _ in BLOCK.findall(page.read_text())}
        assert languages <= TESTED | SHOWN, page.name
    for name, text in blocks("sh"):
        assert all(map(OWN_COMMANDS.match, text.strip().splitlines())), name


def test_the_profiles_of_the_pages_are_valid() -> None:
    for page, text in blocks("yaml"):
        entries = parse_profile(text, page, Layer.USER_PROFILE)
        assert entries.keys() <= TABLE.keys()
        assert not [fault for entry in entries.values() for fault in entry.problems]


@pytest.mark.distributed
@pytest.mark.processes
@pytest.mark.usefixtures("warm_pythons", "torch_asked_once")
def test_the_python_of_the_pages_runs_on_two_ranks() -> None:
    """All blocks run in one launch, each as a script of its own, one after the other."""
    snippets = blocks("python")
    assert len(snippets) >= 5
    assert snippets[0][0] == "README.md"
    body = "".join(
        f"print({page!r}, flush=True)\nexec(compile({text!r}, {page!r}, 'exec'), {{}})\n"
        for page, text in snippets
    )
    done = launch("-q", "--cpu", "--num-processes", "2", script(body), code=0)
    for page, _ in snippets:
        assert f"[1] {page}\n" in done.stdout


README = (ROOT / "README.md").read_text()
COMMANDS = {  # each once, and none that a page shows with its output
    line.partition("   #")[0].strip()
    for _, block in blocks("sh")
    for line in block.splitlines()
    if line.startswith("headway ")
}.difference(command for _, _, command in test_screens.COMMANDS)


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A folder with the files that the README names."""
    stage = tmp_path / "stage"
    stage.mkdir()
    screens.make_stage(stage)
    (stage / "headway.yaml").write_text("num_processes: 2\n")
    (stage / "accelerate.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    return stage


@pytest.mark.distributed
@pytest.mark.usefixtures("warm_pythons", "torch_asked_once")
@pytest.mark.parametrize(
    "command",
    [pytest.param(one, marks=[pytest.mark.long] * ("estimate" in one)) for one in sorted(COMMANDS)],
)
def test_a_command_of_the_readme_and_the_guides_does_what_it_is_there_for(
    command: str, stage: Path
) -> None:
    command = command.replace("--size 124m", "--size tiny")  # a page shows the larger
    words = shlex.split(command.replace("examples/fsdp.py", "train.py"))  # a test trains with it
    if "idle:" in command:  # waits for GPUs
        words[2:2] = ["--machine", "gpu_8_h100.json"]
    if words[1] == "launch" and "--dry-run" not in words and "examples" not in command:
        words.insert(2, "--dry-run")  # one launch of them is enough
    if "unset" in words:
        printed_by("headway config set num_processes=2", stage)
    printed = printed_by(shlex.join(words), stage)
    assert printed.strip()
    assert "Traceback" not in printed
    assert "error:" not in printed, printed


@pytest.mark.processes
@pytest.mark.usefixtures("warm_pythons", "torch_asked_once")
def test_a_guide_shows_a_refusal_as_it_is_printed(stage: Path) -> None:
    (stage / "headway.yaml").unlink()
    page = (ROOT / "docs" / "guides" / "gpus.md").read_text()
    shown = re.findall(r"\$ (headway launch )(--device cuda .*?)\n(.*?)```", page, re.DOTALL)
    (launch, words, refusal) = shown[0]
    assert refusal == printed_by(f"{launch}--dry-run --machine laptop_cpu.json {words}", stage)


BEFORE = """
import torch
from torch.nn.functional import cross_entropy
torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
images = torch.randn(64, 2)
data = torch.utils.data.TensorDataset(images, (images[:, 0] > 0).long())
loader = torch.utils.data.DataLoader(data, batch_size=8)
"""
AFTER = "\nprint('loss', loss.item(), flush=True)\n"


def losses(side: str, *launcher: str) -> list[float]:
    """Run the README's script, as it was (-) or is (+), and return the last loss of each rank."""
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    lines = [line[1:] for line in diff.splitlines() if line[0] in (" ", side)]
    body = "\n".join(lines).replace('"cuda"', '"cpu"')
    command = [*(launcher or [sys.executable]), script(f"{BEFORE}{body}{AFTER}")]
    done = run(command, environment(), timeout_s=120, code=0)
    return [float(text) for text in re.findall(r"loss (\S+)", done.stdout)]


@pytest.mark.distributed
@pytest.mark.usefixtures("warm_pythons", "torch_asked_once")
def test_the_eight_lines_of_the_readme_change_nothing_on_one_process_and_train_on_two() -> None:
    assert losses("+") == losses("-")
    assert len(losses("+", *HEADWAY, "-q", "--cpu", "--num-processes", "2")) == 2


@pytest.mark.processes
@pytest.mark.usefixtures("warm_pythons")
def test_the_shell_loop_of_the_sweeps_page_trains_once_for_each_value() -> None:
    page = (ROOT / "docs" / "guides" / "sweeps.md").read_text()
    loop = BLOCK.findall(page)[0][2].replace("--devices idle:1 --wait", "--cpu")
    script("import sys\nopen(f'{sys.argv[2]}.txt', 'x').close()\n", "train.py")
    loop = loop.replace("headway launch", shlex.join(HEADWAY))
    run(["bash", "-c", loop], environment(), timeout_s=120, code=0)
    assert {path.stem for path in Path().glob("*.txt")} == {"0.1", "0.01", "0.001"}


ANSWERS = {
    "Windows": ("README.md", "Windows is not supported; use WSL2."),
    "torch.save on all ranks": ("docs/guides/coming-from.md", "With `torch.save`, all ranks write"),
    "the machines of the tutorial": ("docs/tutorial.md", "from `tests/machines` in the repository"),
    "notebook_launcher's import": ("docs/guides/training.md", "`notebook_launcher` from `headway`"),
    "a queue for one machine": ("docs/guides/sweeps.md", "The launch that has waited longest"),
}


@pytest.mark.parametrize("question", ANSWERS)
def test_a_page_answers_what_newcomers_have_asked(question: str) -> None:
    page, answer = ANSWERS[question]
    assert answer in " ".join((ROOT / page).read_text().split())
