"""A checkout with one commit whose launch/tpu_pod.sh runs against the stand-in for Cloud TPUs."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

from stand_in.gcloud import Cloud

ROOT = Path(__file__).resolve().parent.parent
TRAINER = Path(__file__).resolve().parent / "stand_in" / "trainer.sh"
FLAGS = "--name pod --zone us-west4-a --project mine --type v5litepod-16 --run gs://bucket/runs/one".split()
TRAINING = "-- pretrain/gpt1 --data.store gs://bucket/store --num-steps 2".split()


def make_checkout(folder: Path) -> Path:
    """Make a repository with the launch scripts, an empty config, and a setup.sh that installs a stand-in."""
    shutil.copytree(ROOT / "launch", folder / "launch")
    (folder / "launch" / "setup.sh").write_text(
        f"#!/usr/bin/env bash\nmkdir -p .venv/bin\ncp {TRAINER} .venv/bin/python\necho $1 >.kind\n"
    )
    (folder / "configs" / "pretrain").mkdir(parents=True)
    (folder / "configs" / "pretrain" / "gpt1.py").touch()
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    """Commit what is there, be it nothing new."""
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, "commit", "-qm", "one", "--allow-empty"], cwd=folder, check=True)


class PodCloud(Cloud):
    """The cloud, a store in its bucket, and the launcher of a checkout."""

    def __init__(self, root: Path, checkout: Path):
        super().__init__(root / "cloud")
        self.checkout = checkout
        (self.buckets / "bucket" / "store").mkdir(parents=True)
        (self.buckets / "bucket" / "store" / "tokens.bin").write_text("tokens")
        self.settings: dict[str, str] = {}  # of the launcher's environment
        self.launchers: list[subprocess.Popen] = []

    def plan(self, *lines: str) -> None:
        """Write what the trainer does, start by start."""
        (self.root / "plan").write_text("".join(f"{line}\n" for line in lines))

    def start(self, *words: str, home: Path | None = None) -> subprocess.Popen:
        command = [str(self.checkout / "launch" / "tpu_pod.sh"), *words]
        environment = (
            self.environment("programs") | {"XDG_STATE_HOME": str(home or self.root / "state")} | self.settings
        )
        pipe = subprocess.PIPE
        self.launchers.append(
            subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        )
        return self.launchers[-1]

    def run(self, *words: str, home: Path | None = None) -> tuple[int, str, str]:
        process = self.start(*words, home=home)
        output, errors = process.communicate(timeout=120)
        assert not self.tracebacks, self.tracebacks[0]
        return process.returncode, output, errors

    def follow_run(self) -> subprocess.Popen:
        """Return a launcher that follows a run which is under way."""
        following = self.start(*FLAGS, *TRAINING)
        self.wait(lambda: len(list(self.root.glob("running-*"))) == 2, following)
        return following

    def started(self) -> list[str]:
        """Return the words of each trainer that was started, its worker before them."""
        file = self.root / "trained"
        return file.read_text().splitlines() if file.exists() else []

    def close(self) -> None:
        for process in self.launchers:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        super().close()
