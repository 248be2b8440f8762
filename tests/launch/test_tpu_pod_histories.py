"""launch/tpu_pod.sh in random histories: queues, preemptions, refusals, broken connections, restarts, other people.

Fails when a pod of somebody else is touched, one is left to cost money after the end, one is bought after `delete`, or
a run does not complete that can. Fails on 2968321 in most histories. A failure prints its seed.
"""

from pathlib import Path

import pytest
from pod_history import History
from pod_launcher import FLAGS, TRAINING, make_checkout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    return make_checkout(tmp_path_factory.mktemp("histories") / "checkout")


def launch(history: History) -> tuple[int, str]:
    """Launch as a person does who comes back: after a stop, a lost launcher, and a request to be deleted first."""
    for _ in range(6):
        before = len(history.calls)
        code, _, errors = history.run(*FLAGS, *TRAINING)
        last = (errors.strip().splitlines() or [""])[-1]
        history.tell(f"the launcher ended with {code}: {last}")
        # Without a pod to set up it was the first request that failed, which is for a person to mend.
        first = all(words[3] != "scp" for words in history.calls[before:])
        if first and last.endswith("delete it and try again"):
            history.run("delete", *FLAGS)
        elif not (code in (75, -9) or (first and ("correct it" in last or "gcloud cannot read" in last))):
            break
    return code, last


def check(history: History) -> None:
    code, last = launch(history)
    left = history.request()
    assert history.touched == [], "somebody else's pod"
    assert history.bystander.poll() is None, "somebody else's process"
    # A request that was under way when `delete` was called on this machine is made, and given back at once.
    assert history.bought_after_delete <= (history.deleted == "here"), "bought after delete"
    assert not history.ran_after_delete, "used after delete"
    if left and left.foreign:
        assert code == 2 if history.ending == "foreign at first" else code == 1, "not refused"
        assert "label jaxlm_run" in last or "another request" in last or "--run must" in last
        return
    assert left is None and not history.nodes, "left to cost money"
    assert history.complete or history.deleted, "not complete"
    if code == 1:
        assert history.deleted or history.ending == "second launcher", "given up"
        assert "no new one is requested" in last
    else:
        assert code == 0 and history.complete


def play(seed: int, root: Path, checkout: Path) -> History:
    history = History(root, checkout, seed)
    try:
        check(history)
    except Exception as error:
        lines = "\n".join(history.told)
        raise AssertionError(f"seed {seed}, {history.ending}: {error}\n{lines}") from error
    finally:
        history.close()
    return history


@pytest.mark.slow
# Each ending once. The last: of two launchers, the one that found the pod suspended gave up after one refused request.
@pytest.mark.parametrize("seed", [*range(4), *range(5, 9), 1095])
def test_a_random_history_ends_well(seed, tmp_path, checkout):
    play(seed, tmp_path, checkout)


def pytest_generate_tests(metafunc):
    """Give the campaign a history for every ten of its faults."""
    if metafunc.function is test_many_random_histories_end_well:
        metafunc.parametrize("seed", range(1000, 1000 + metafunc.config.getoption("--campaign", 0) // 10))


@pytest.mark.campaign
def test_many_random_histories_end_well(seed, tmp_path, checkout):
    play(seed, tmp_path, checkout)
