"""launch/tpu_pod.sh where something goes wrong: other people's pods, deletion, lost connections, refusals, restarts.

Fails when a pod of somebody else is touched, one is bought that nobody wants, or a run ends that could go on.
"""

import os
import signal
import subprocess

import pytest
from pod_launcher import FLAGS, TRAINING
from stand_in.gcloud import Request


def foreign(**changes) -> Request:
    """A pod as the launcher's own would be, of somebody else."""
    return Request(**{"name": "pod", "kind": "v5litepod-16", "nodes": ["pod"], "labels": {}, "foreign": True} | changes)


@pytest.mark.parametrize("state", ["ACTIVE", "SUSPENDED", "FAILED", "WAITING_FOR_RESOURCES"])
@pytest.mark.parametrize("node", ["pod", "theirs"])
def test_somebody_elses_pod_is_left_alone(cloud, node, state):
    """Fails on 2968321: type and count were compared, so a pod with another node was "given back"."""
    cloud.create(foreign(nodes=[node], state=state))
    code, _, errors = cloud.run(*FLAGS, *TRAINING)
    assert code == 2 and "which has no label jaxlm_run" in errors.splitlines()[-1]
    assert [cloud.run(command, *FLAGS)[0] for command in ("stop", "status", "logs", "delete")] == [2] * 4
    assert cloud.touched == [] and cloud.verbs() == [] and cloud.requests["pod"].state == state


def test_a_pod_of_another_run_is_left_alone(cloud):
    """Fails on 2968321: two people who call their pods alike took each other's."""
    cloud.plan("complete")
    assert cloud.run(*FLAGS, "--keep", *TRAINING)[0] == 0
    cloud.calls.clear()
    other = [*FLAGS[:-1], "gs://bucket/runs/two"]
    for command, words in (("create", TRAINING), ("delete", []), ("stop", [])):
        code, _, errors = cloud.run(command, *other, *words)
        assert code == 2 and "--run must be the run that pod pod was made for" in errors.splitlines()[-1]
    assert cloud.verbs() == []
    for command in ("delete", "stop"):  # took the pod of any run
        code, _, errors = cloud.run(command, *FLAGS[:6])
        assert code == 2 and f"--run must be given to {command} a pod" in errors.splitlines()[-1]
    assert cloud.run("status", *FLAGS[:6])[0] == 0 and cloud.verbs().count("delete") == 0
    assert cloud.run("delete", *FLAGS)[0] == 0 and not cloud.requests


def test_a_pod_without_its_node_is_not_deleted_at_first_contact(cloud):
    """Fails on 2968321: it was deleted, and another one bought."""
    cloud.plan("complete")
    assert cloud.run(*FLAGS, "--keep", *TRAINING)[0] == 0
    cloud.lose("pod")
    code, _, errors = cloud.run(*FLAGS, *TRAINING)
    assert code == 2 and "pod pod is ACTIVE without its node pod" in errors.splitlines()[-1]
    assert cloud.verbs().count("create") == 1 and "delete" not in cloud.verbs()


def test_a_pod_that_somebody_else_takes_in_between_is_left_alone(cloud):
    """Fails on 2968321: after a preemption any pod of that name was taken."""
    cloud.plan("preempt")
    theirs = foreign(labels={"jaxlm_run": "another"})
    cloud.after_removal = lambda: cloud.create(theirs)
    code, _, errors = cloud.run(*FLAGS, *TRAINING)
    assert code == 1 and "now belongs to another request" in errors.splitlines()[-1]
    assert cloud.touched == [] and cloud.requests == {"pod": theirs} and len(cloud.started()) == 2


def test_a_deleted_pod_ends_its_follower(cloud, tmp_path):
    """Fails on 2968321: the follower took it for a preemption and bought another pod. On this machine or another."""
    for home in (None, tmp_path / "other"):
        cloud.plan(*["run"] * 2)
        following = cloud.follow_run()
        assert cloud.run("delete", *FLAGS, home=home)[0] == 0
        _, errors = following.communicate(timeout=60)
        assert following.returncode == 1 and "no new one is requested" in errors.splitlines()[-1]
        assert not cloud.requests and not cloud.nodes
        for file in cloud.root.glob("running-*"):
            file.unlink()
    assert cloud.verbs().count("create") == 2


@pytest.mark.parametrize("moment", ["a pause", "the request"])
def test_a_launcher_without_a_pod_hears_of_delete(cloud, moment):
    """Fails on 2968321: it asked again. While it pauses after a refused request, and while a request is under way."""
    cloud.plan("preempt", "complete")
    codes = []

    def before(words):
        if words[3] == "create" and len(cloud.started()) == 2 and not codes:
            codes.append(None)
            if moment == "a pause":
                cloud.refusals = 1
                cloud.at_sleep = delete
            else:
                delete()

    def delete():
        cloud.at_sleep = lambda: None
        codes.append(cloud.run("delete", *FLAGS)[0])

    cloud.before = before
    code, _, errors = cloud.run(*FLAGS, "--spot", *TRAINING)
    assert codes == [None, 1] and code == 1 and "no new one is requested" in errors.splitlines()[-1], errors
    assert not cloud.requests and len(cloud.started()) == 2


def test_of_two_launchers_the_second_stops_when_the_first_gives_the_pod_back(cloud):
    """Fails on 2968321: it bought another pod for a run that is complete."""
    cloud.plan("complete", "complete")
    codes = []

    def before(words):
        if "follow" in words[-1] and not codes:
            codes.append(None)
            codes.append(cloud.run(*FLAGS, *TRAINING)[0])

    cloud.before = before
    code, _, errors = cloud.run(*FLAGS, *TRAINING)
    assert codes == [None, 0] and code == 1 and "given back by another launcher" in errors.splitlines()[-1], errors
    assert cloud.verbs().count("create") == 1 and not cloud.requests


def test_a_lost_connection_is_not_a_failure_of_the_run(cloud):
    """Fails on 2968321: four of them, over whatever time, ended the launcher with exit code 1."""
    cloud.plan("run")
    following = cloud.start(*FLAGS, "--retries", "0", *TRAINING)
    cloud.before = lambda words: (
        cloud.wait(lambda: len(list(cloud.root.glob("running-*"))) == 2) if "follow" in words[-1] else None
    )
    cloud.wait(lambda: "ssh pod/all start" in cloud.verbs(), following)
    cloud.dropped = 24
    cloud.wait(lambda: not cloud.dropped, following)
    (cloud.root / "code").write_text("0")
    (cloud.root / "signalled").touch()
    _, errors = following.communicate(timeout=60)
    assert following.returncode == 0 and errors.count("cannot be reached") <= 2, errors
    assert len(cloud.started()) == 2, "it was not started again"


def test_workers_that_stay_out_of_reach_are_a_failure(cloud):
    """They are asked for an hour, and then once more for each retry."""
    cloud.plan("complete")

    def before(words):
        cloud.dropped = 9
        cloud.advance(300 if words[3] == "scp" else 0)

    cloud.before = before
    began = cloud.clock
    code, _, errors = cloud.run(*FLAGS, "--retries", "1", *TRAINING)
    assert (
        code == 1
        and "the workers could not be reached for 3600 s, 2 times; pod pod is still" in errors.splitlines()[-1]
    )
    assert 7200 <= cloud.clock - began < 8400 and not cloud.started()


def test_an_hour_of_the_run_starts_the_count_of_failures_anew(cloud):
    """Fails on 2968321: three failures in three weeks were as many as three in a minute."""
    cloud.plan("abort", "abort", "abort", "complete")
    hours = iter([0, 4000, 4000, 0])
    cloud.before = lambda words: cloud.advance(next(hours)) if "follow" in words[-1] else None
    assert cloud.run(*FLAGS, "--retries", "1", *TRAINING)[0] == 0
    assert len(cloud.started()) == 8


@pytest.mark.parametrize("kind", ["refusals", "failing"])
def test_a_request_is_repeated_after_a_preemption(cloud, kind):
    """Fails on 2968321: one refused or FAILED request ended an unattended run."""
    cloud.plan("preempt", "complete")
    cloud.after_removal = lambda: setattr(cloud, kind, 2)
    began = cloud.clock
    code, _, errors = cloud.run(*FLAGS, "--retries", "2", *TRAINING)
    assert code == 0 and errors.count("it will be repeated") == 2, errors
    assert 180 <= cloud.clock - began < 400, "with pauses between them"


def test_a_request_whose_answer_is_lost_is_followed(cloud):
    """Fails on 2968321: the launcher ended, and nobody knew of the pod that was paid for."""
    cloud.plan("complete")
    cloud.unanswered = 1
    code, _, errors = cloud.run(*FLAGS, *TRAINING)
    assert code == 0 and not cloud.requests and cloud.verbs().count("create") == 1, errors


def test_a_lost_answer_is_asked_for_until_gcloud_can_tell(cloud):
    """Fails if a request counts as refused while nothing can be read: its pod was ACTIVE, and nothing said so."""
    cloud.plan("complete")
    cloud.unanswered, cloud.silent = 1, 5
    code, _, errors = cloud.run(*FLAGS, *TRAINING)
    assert code == 0 and not cloud.requests and cloud.verbs().count("create") == 1, errors
    assert "refused" not in errors
    began, cloud.unanswered, cloud.silent = cloud.clock, 1, 10_000
    code, _, errors = cloud.run(*FLAGS, *TRAINING)
    last = errors.splitlines()[-1]
    assert code == 1 and "gcloud cannot tell whether the request was made: ERROR: gcloud crashed" in last
    command = "launch/tpu_pod.sh delete --name pod --zone us-west4-a --project mine --run gs://bucket/runs/one"
    assert last.endswith(f"; pod pod may exist and cost money: {command}")
    assert 3600 <= cloud.clock - began < 3700 and set(cloud.requests) == {"pod"}


CALLS = (  # of a run from its request to its end, and what exists when the launcher is interrupted at that call
    ("describe pod", 1, ""),
    ("create pod", 1, "may exist and cost money; "),
    ("describe pod", 2, "may exist and cost money; "),
    ("describe pod", 3, "still exists and costs money; "),  # of the node
    ("scp", 1, "still exists and costs money; "),
    ("install", 1, "still exists and costs money; "),
    ("stage", 1, "still exists and costs money; "),
    ("start", 1, "still exists and costs money; "),
    ("follow", 1, "still exists and costs money; "),
    ("result", 1, "still exists and costs money; "),
    ("describe pod", 4, "still exists and costs money; "),  # the run is complete
    ("delete pod", 1, "may exist and cost money; "),
)


SIGNALS = [("SIGINT", *call) for call in CALLS]
SIGNALS += [(name, *call) for name in ("SIGTERM", "handled") for call in CALLS if call[1] == 1]


@pytest.mark.parametrize(("name", "call", "number", "said"), SIGNALS)
def test_an_interrupted_launcher_tells_of_its_pod(cloud, name, call, number, said):
    """Fails if it ends without a line while a pod costs money; `handled`: gcloud outlives Ctrl-C and exits with 1."""
    cloud.plan("complete")
    seen = []

    def before(words):
        sent = " ".join(words[3:])
        if call in (sent if " " in call else sent.split()) or f"pod_worker.sh {call} " in sent:
            seen.append(sent)
            if len(seen) == number:
                stop = signal.SIGTERM if name == "SIGTERM" else signal.SIGINT
                if name == "handled":
                    os.kill(process.pid, stop)  # and the stand-in for gcloud ends as if nothing had happened
                else:
                    os.killpg(process.pid, stop)

    cloud.before = before
    process = cloud.start(*FLAGS, *TRAINING)
    _, errors = process.communicate(timeout=60)
    assert len(seen) == number and process.returncode == (-signal.SIGTERM if name == "SIGTERM" else -signal.SIGINT)
    last = errors.splitlines()[-1] if errors else ""
    assert ("interrupted: pod pod" in errors) == bool(said), errors
    if said:
        assert f"interrupted: pod pod {said}" in last
        assert "launch/tpu_pod.sh delete --name pod --zone us-west4-a --project mine --run gs://bucket/runs/one" in last


@pytest.mark.parametrize(("kind", "said"), [("refusals", "the request was refused"), ("failing", "the request failed")])
def test_requests_are_not_repeated_for_ever(cloud, kind, said):
    cloud.plan("preempt")
    setattr(cloud, kind, 1)
    assert cloud.run(*FLAGS, *TRAINING)[0] == 1 and not cloud.started(), "the first is for a person to mend"
    assert cloud.run("delete", *FLAGS)[0] == (1 if kind == "refusals" else 0)
    cloud.after_removal = lambda: setattr(cloud, kind, 9)
    code, _, errors = cloud.run(*FLAGS, "--retries", "2", *TRAINING)
    assert code == 1 and f"{said}" in errors.splitlines()[-1] and ", 3 times: " in errors.splitlines()[-1]
    assert not cloud.nodes


def test_states_that_pass_are_waited_for(cloud):
    """A request that is queued, one that is taken away, and one that is not there any more."""
    cloud.plan("suspend", "complete")
    first, second = iter(["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]), iter(["SUSPENDING"] * 3 + ["SUSPENDED"])

    def before(words):
        request = cloud.requests.get("pod")
        if words[2:4] == ["queued-resources", "describe"] and request and cloud.verbs().count("create") == 1:
            request.state = next(second if cloud.started() else first, request.state)

    cloud.before = before
    code, _, errors = cloud.run(*FLAGS, *TRAINING)
    assert code == 0 and cloud.verbs().count("create") == 2, errors
    said = [line.partition("pod pod: ")[2] for line in errors.splitlines() if "pod pod: " in line]
    states = ["NONE", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE", "SUSPENDING", "SUSPENDED", "NONE", "ACTIVE"]
    assert said == states, errors


def test_a_pid_of_another_boot_is_not_a_running_job(cloud):
    """Fails on 2968321: the launcher waited for ever for a process that is not the run's, while the pod cost money."""
    other = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        cloud.plan("run", "complete")
        following = cloud.follow_run()
        cloud.plan("complete", "complete")
        for worker in (0, 1):
            cloud.reboot("pod", worker, other.pid)
        _, errors = following.communicate(timeout=100)
        assert following.returncode == 0 and "the run failed; it will be tried again" in errors, errors
        assert len(cloud.started()) == 4 and other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_connections_notice_a_host_that_vanished(cloud):
    """Fails on 2968321: ssh was left to the kernel's two hours."""
    cloud.plan("complete")
    assert cloud.run(*FLAGS, *TRAINING)[0] == 0
    for verb, flag in (("ssh", "--ssh-flag"), ("scp", "--scp-flag")):
        for words in (words for words in cloud.calls if words[3] == verb):
            assert f"{flag}=-oServerAliveInterval=30" in words and f"{flag}=-oServerAliveCountMax=4" in words


def test_a_worker_that_does_not_end_is_ended(cloud):
    """Fails on 2968321: it was asked 45 times a second, without end."""
    cloud.plan("hang", "complete")
    cloud.before = lambda words: cloud.advance(120 if " result " in words[-1] else 0)
    began = cloud.clock
    code, _, errors = cloud.run(*FLAGS, *TRAINING)
    assert code == 0 and "some workers still run 3600 s after another ended: ending them" in errors, errors
    assert len(cloud.started()) == 4 and 3600 <= cloud.clock - began < 4200
    assert cloud.verbs().count("ssh pod/all result") <= 3600 // 150 + 3


def test_only_a_refusal_is_a_refusal(cloud):
    """Fails on 2968321: tar's exit code for a full disk is 2, and "a worker refused its command" was the end."""
    cloud.plan("complete")
    cloud.broken = {"tar": 1}
    code, _, errors = cloud.run(*FLAGS, *TRAINING)
    assert code == 0 and "the workers could not be set up; it will be tried again" in errors and "refused" not in errors


def test_a_run_that_was_stopped_stays_so_when_its_worker_is_not_reached(cloud):
    """Fails on 2968321: where worker 0 did not say that it was stopped on purpose the run was started again."""
    cloud.plan("run", "complete")
    following = cloud.follow_run()
    assert cloud.run("stop", *FLAGS)[0] == 0
    dropped = []

    def before(words):
        """Drop the connection after the one that tells the result."""
        cloud.dropped = len(dropped) == 1
        if " result " in words[-1]:
            dropped.append(words)

    cloud.before = before
    (cloud.root / "signalled").touch()
    following.communicate(timeout=60)
    assert following.returncode == 75 and len(cloud.started()) == 2
