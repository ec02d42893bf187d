"""Installs the wheel without extras into an empty environment, and trains there.

    python tests/bare_install.py

The environment of the tests has packages that no user has. `.venv-bare` has torch and what the
wheel requires, nothing else; each extra then gets an environment on top of it. All are kept, and
made again when the requirements change. Python needs the package `build`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("demo", "examples", "docs")  # the others are for contributors

TRAIN = """
import sys
import torch
from headway import Accelerator

accelerator = Accelerator(project_dir="run", seed=1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
folder = f"saved-{accelerator.num_processes}"
if "--resume" in sys.argv:
    accelerator.load_state(folder)
    assert optimizer.state_dict()["state"][0]["step"] == len(loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
accelerator.save_state(folder)
losses = accelerator.gather(torch.ones(1, device=accelerator.device))
accelerator.print("trained on", len(losses))
accelerator.end_training()
"""

COMMANDS = (
    ["--help"],
    ["config", "--yes"],
    ["doctor"],
    ["test", "--cpu"],
    ["test", "--cpu", "--num-processes", "2"],
    ["launch", "--cpu", "--num-processes", "1", "train.py"],
    ["launch", "--cpu", "--num-processes", "1", "train.py", "--resume"],
    ["launch", "--cpu", "--num-processes", "2", "train.py"],
    ["launch", "--cpu", "--num-processes", "2", "train.py", "--resume"],
)
OF_EXTRAS = {
    "demo": ["launch", "--cpu", "--num-processes", "2", str(ROOT / "examples" / "digits.py")],
}


def build_wheel(folder: str) -> str:
    """Build a wheel of the tracked files in this folder, and return its path."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    copy = Path(folder, "tree")
    copy.mkdir()
    pack = ["tar", "c", "--null", "--files-from", "-"]
    packed = subprocess.run(pack, cwd=ROOT, check=True, input=names.stdout, capture_output=True)
    subprocess.run(["tar", "x"], cwd=copy, check=True, input=packed.stdout)
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", folder, str(copy)]
    done = subprocess.run(build, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return str(next(Path(folder).glob("*.whl")))


def requirements(wheel: str) -> str:
    """Return the lines of the wheel's metadata that declare what it requires."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    return "\n".join(line for line in lines if line.startswith("Requires-Dist:"))


def environment(name: str, wheel: str, base: Path | None = None) -> Path:
    """Return a virtual environment with this wheel, made again if its requirements have changed.

    Args:
        name: of the folder, and the extra to install; "bare" for none.
        wheel: path of the wheel.
        base: site-packages folder whose packages are visible in the environment, too.
    """
    folder = ROOT / f".venv-{name}"
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    install = [str(python), "-m", "pip", "install", "--quiet"]
    install += ["--constraint", str(ROOT / "constraints.txt")]
    ready = folder / ".ready"
    if not ready.exists() or ready.read_text() != requirements(wheel):
        venv.create(folder, clear=True, with_pip=True)
        if base is not None:
            (site / "base.pth").write_text(str(base))
        extra = "" if name == "bare" else f"[{name}]"
        subprocess.run([*install, wheel + extra], check=True)
        ready.write_text(requirements(wheel))
    subprocess.run([*install, "--no-deps", "--force-reinstall", wheel], check=True)
    return folder


def failures(where: Path, commands: list[list[str]]) -> int:
    """Run these commands of `headway` in an empty folder; print each, and why it failed."""
    num_failed = 0
    with tempfile.TemporaryDirectory() as home:
        Path(home, "train.py").write_text(TRAIN)
        for words in commands:
            done = subprocess.run(
                [str(where / "bin" / "headway"), *words],
                cwd=home,
                env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": home},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=300,
            )
            unusable = done.returncode or "NumPy" in done.stdout
            print(f"{where.name}: headway {' '.join(words)}: {'FAILED' if unusable else 'ok'}")
            if unusable:
                num_failed += 1
                print(done.stdout, flush=True)
    return num_failed


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(folder)
        bare = environment("bare", wheel)
        num_failed = failures(bare, list(COMMANDS))
        site = Path(sysconfig.get_path("purelib", vars={"base": str(bare)}))
        for extra in EXTRAS:
            where = environment(extra, wheel, base=site)
            own = OF_EXTRAS.get(extra)
            two_ranks = ["launch", "--cpu", "--num-processes", "2", "train.py"]
            num_failed += failures(where, [["doctor"], two_ranks, *([own] if own else [])])
    print(f"{num_failed} failed" if num_failed else "all passed")
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
