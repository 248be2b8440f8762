"""A stand-in for the Google Cloud CLI, for tests of launch/tpu_pod.sh: `gcloud.py ARGUMENTS`, its folder is $STAND_IN.

It is no cloud. A pod is a file with its state, a worker a folder that is $HOME for the commands sent to it, a bucket a
folder. calls.jsonl there records each call. It plays what the folder asks for: `refuse`, a quota that is exhausted;
`away`, "KIND N": the next N calls of that kind (queued-resources or tpu-vm) do not reach the cloud.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

WORKERS = 2  # of a node
ROOT = Path(os.environ["STAND_IN"])
PODS, BUCKETS = ROOT / "pods", ROOT / "buckets"


def flag(words: list[str], name: str, default: str | None = None) -> str | None:
    return words[words.index(name) + 1] if name in words else default


def homes(node: str, worker: str) -> list[Path]:
    return [PODS / node / f"worker-{k}" for k in range(WORKERS) if worker in ("all", str(k))]


def queued_resources(verb: str, name: str, words: list[str]) -> int:
    state = PODS / f"{name}.state"
    if verb == "create":
        if (ROOT / "refuse").exists():
            print("ERROR: (gcloud.compute.tpus.queued-resources.create) RESOURCE_EXHAUSTED: quota", file=sys.stderr)
            return 1
        count = int(flag(words, "--node-count", "0"))
        nodes = [f"{flag(words, '--node-prefix')}-{k}" for k in range(count)] or [flag(words, "--node-id")]
        for node in nodes:
            for home in homes(node, "all"):
                home.mkdir(parents=True)
            (PODS / node / "state").write_text("READY")
        state.write_text("ACTIVE")
        (PODS / f"{name}.spec").write_text(f"{flag(words, '--accelerator-type')}\t{count or ''}\t")
        (PODS / f"{name}.nodes").write_text("\n".join(nodes))
        return 0
    if not state.exists():
        return not_found()
    if verb == "describe":
        print((PODS / f"{name}.spec" if "nodeSpec" in str(flag(words, "--format")) else state).read_text())
    if verb == "delete":
        for node in (PODS / f"{name}.nodes").read_text().split():
            shutil.rmtree(PODS / node)
        state.unlink()
    return 0


def not_found() -> int:
    print("ERROR: (gcloud.compute.tpus) NOT_FOUND: Resource was not found", file=sys.stderr)
    return 1


def away(kind: str) -> bool:
    file = ROOT / "away"
    which, number = file.read_text().split() if file.exists() else ("", "0")
    if which != kind or number == "0":
        return False
    file.write_text(f"{kind} {int(number) - 1}")
    print("ERROR: gcloud crashed (TransportError): Unable to find the server", file=sys.stderr)
    return True


def tpu_vm(verb: str, words: list[str]) -> int:
    if verb == "scp":
        file, (node, _, name) = words[0], words[1].partition(":")
        for home in homes(node, flag(words, "--worker")):
            shutil.copy(file, home / name)
        return 0
    node = words[0]
    if not (PODS / node).exists():
        return not_found()
    if verb == "describe":
        print((PODS / node / "state").read_text())
        return 0
    code = 0
    for home in homes(node, flag(words, "--worker")):
        if (PODS / node / "state").read_text() != "READY":
            return 255  # as ssh, of a machine that is gone
        done = subprocess.run(["bash", "-c", flag(words, "--command")], cwd=home, env={**os.environ, "HOME": str(home)})
        code = code or done.returncode
    return code


def main(words: list[str]) -> int:
    with (ROOT / "calls.jsonl").open("a") as file:
        file.write(json.dumps(words) + "\n")
    if words[:3] == ["storage", "rsync", "--recursive"]:
        shutil.copytree(BUCKETS / words[3].removeprefix("gs://"), words[4], dirs_exist_ok=True)
        return 0
    kind, verb = words[2], words[3]
    if away(kind):
        return 1
    return queued_resources(verb, words[4], words) if kind == "queued-resources" else tpu_vm(verb, words[4:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
