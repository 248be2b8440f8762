"""Random histories of a pod on the stand-in for Cloud TPUs: what happens to it, and when, by a clock that jumps.

A run takes hours of the stand-in's clock and saves a checkpoint every five minutes. Its trainers are real processes
that wait to be told that they have ended; whoever follows their log sleeps until the next event. The seed decides
everything.
"""

import contextlib
import heapq
import itertools
import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from pod_launcher import FLAGS, TRAINING, PodCloud
from stand_in.gcloud import Request, flag

EVERY = 300  # seconds between two checkpoints
RETRIES = 3  # as the launcher's --retries
# Who has a hand in it, by the seed's last digit.
ENDINGS = (
    "complete",
    "deleted here",
    "stopped",
    "deleted elsewhere",
    "complete",
    "second launcher",
    "launcher killed",
    "foreign at first",
    "foreign in between",
    "complete",
)


class History(PodCloud):
    """A run of `work` seconds, the faults of one seed, and what came of them."""

    def __init__(self, root: Path, checkout: Path, seed: int):
        super().__init__(root, checkout)
        self.random = random.Random(seed)
        self.work = self.random.randrange(3600, 6 * 3600, EVERY)
        self.saved = 0  # seconds of work that the newest checkpoint holds
        self.complete = False
        self.began: float | None = None  # when all trainers had started
        self.start_number = 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.unreachable = self.out_of_sight = 0.0  # until when
        self.hangs = 0  # of the ends of the run that are to come
        self.deleted = ""  # by whom a pod was given back while it was followed
        self.bought_after_delete = 0
        self.ran_after_delete = False
        self.told: list[str] = []
        self.bystander = subprocess.Popen(["sleep", "100000"], start_new_session=True)
        self.plan(*["wait"] * 60)
        self.ending = ENDINGS[seed % len(ENDINGS)]
        self.person: Callable[[], None] | None = None  # does something soon after the next preemption
        self.plan_faults()

    # What is going to happen

    def at(self, moment: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (moment, next(self.numbers), event))

    def plan_faults(self) -> None:
        """Draw what happens, at most RETRIES failures among it, since every fourth in a row ends the launcher."""
        counted = [self.fail, self.reboot_worker, self.hide, self.hang]
        faults = self.random.choices(counted, k=self.random.randint(0, RETRIES))
        faults += [self.take_away, *self.random.choices([self.take_away, self.drop], k=self.random.randint(0, 4))]
        for fault in faults:
            self.at(self.clock + self.random.uniform(60, 1.2 * self.work), fault)
        people = {
            "deleted here": lambda: self.give_back_by_hand(self.root / "state"),
            "deleted elsewhere": lambda: self.give_back_by_hand(self.root / "elsewhere"),
            "stopped": self.stop,
            "second launcher": self.launch_again,
            "launcher killed": self.kill_launcher,
        }
        if self.ending in people and self.random.random() < 0.5:
            self.at(self.clock + self.random.uniform(30, 1.1 * self.work), people[self.ending])
        else:
            self.person = people.get(self.ending)
        if self.ending == "foreign at first":
            state = self.random.choice(["ACTIVE", "SUSPENDED", "FAILED", "WAITING_FOR_RESOURCES", "PROVISIONING"])
            self.create(self.foreign(state))

    def foreign(self, state: str) -> Request:
        labels = self.random.choice([{}, {"team": "theirs"}, {"jaxlm_run": "other"}])
        node = self.random.choice(["pod", "theirs"])
        return Request("pod", "v5litepod-16", [node], labels, state=state, foreign=True)

    # Faults

    def request(self) -> Request | None:
        return self.requests.get("pod")

    def tell(self, what: str) -> None:
        self.told.append(f"{self.clock - 1_800_000_000:.0f} s: {what}")

    def take_away(self) -> None:
        """Preempt the pod; the next requests may be refused, fail, or come too late."""
        request = self.request()
        if not request or request.state != "ACTIVE" or request.foreign:
            return
        self.tell("preempted")
        self.interrupt()
        for node in request.nodes:
            self.nodes[node] = self.random.choice(["PREEMPTED", "TERMINATED"])
            self.kill(node)
        if self.random.random() < 0.7:
            request.state = "SUSPENDING"
            self.at(self.clock + self.random.uniform(0, 200), lambda: self.suspend(request))
        self.refusals, self.failing = self.random.choice([(0, 0), (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2)])
        if self.person:
            self.at(self.clock + self.random.uniform(0, 900), self.person)
            self.person = None
        if self.ending == "foreign in between":
            self.after_removal = lambda: self.create(self.foreign("ACTIVE"))

    def suspend(self, request: Request) -> None:
        if self.request() is request:
            request.state = "SUSPENDED"
            for node in request.nodes:
                self.nodes.pop(node, None)

    def fail(self) -> None:
        if self.began is not None:
            self.tell("the run fails")
            self.interrupt()
            self.end_trainers(signal.SIGUSR2)

    def reboot_worker(self) -> None:
        """Restart one worker; the others notice after five minutes that it is gone, and end with 1."""
        if self.began is not None:
            worker = self.random.randrange(2)
            self.tell(f"worker {worker} restarts")
            self.interrupt()
            self.reboot("pod", worker, self.bystander.pid)
            number = self.start_number
            self.at(self.clock + 300, lambda: number == self.start_number and self.end_trainers(signal.SIGUSR2))

    def drop(self) -> None:
        self.unreachable = self.clock + self.random.uniform(10, 900)
        self.tell(f"no connections until {self.unreachable - 1_800_000_000:.0f} s")

    def hide(self) -> None:
        self.out_of_sight = self.clock + self.random.uniform(10, 400)
        self.tell(f"gcloud does not work until {self.out_of_sight - 1_800_000_000:.0f} s")

    def hang(self) -> None:
        self.hangs += 1

    # People

    def give_back_by_hand(self, home: Path) -> None:
        """Run the command delete, from another terminal or on another machine."""
        self.tell("delete")
        code, _, errors = self.run("delete", *FLAGS, home=home)
        here = home == self.root / "state"
        if code == 0 or here:
            self.deleted = "here" if here else "elsewhere"
            assert self.request() is None or code, errors
        self.tell(f"delete ended with {code}: {errors.strip()}")

    def stop(self) -> None:
        if self.began is None:
            return
        self.tell("stop")
        code = self.run("stop", *FLAGS)[0]
        if code == 0 and self.began is not None:
            self.interrupt()
            self.end_trainers(signal.SIGTERM)

    def launch_again(self) -> None:
        self.tell("second launcher")
        code, _, errors = self.run(*FLAGS, *TRAINING)
        self.tell(f"second launcher ended with {code}: {errors.strip().splitlines()[-1]}")

    def kill_launcher(self) -> None:
        self.tell("the launcher is killed")
        process = self.launchers[0]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    # The run

    def started_all(self) -> None:
        """Let the run begin once a trainer waits on each worker."""
        if self.began is not None or self.request() is None or self.nodes.get("pod") != "READY":
            return
        homes = self.homes("pod")
        if all(self.trainer(home) for home in homes):
            for home in homes:
                self.wait((home / "waits").exists)
            self.began = self.clock
            self.ran_after_delete |= bool(self.deleted)
            self.start_number += 1
            number = self.start_number
            self.tell(f"runs from {self.saved}")
            self.at(self.clock + self.work - self.saved, lambda: self.finish(number))

    def interrupt(self) -> None:
        """Keep what the newest checkpoint holds."""
        if self.began is not None:
            self.saved = min(self.work, (self.saved + int(self.clock - self.began)) // EVERY * EVERY)
            self.began = None

    def finish(self, number: int) -> None:
        if self.began is None or number != self.start_number:
            return
        self.began, self.saved, self.complete = None, self.work, True
        self.tell("complete")
        self.end_trainers(signal.SIGUSR1, workers="0" if self.hangs else "all")
        self.hangs = max(0, self.hangs - 1)

    def end_trainers(self, number: int, workers: str = "all") -> None:
        for home in self.homes("pod", workers):
            pid = self.trainer(home)
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                self.wait((home / "jaxlm-pod/jobs/pod/exit").exists)

    # The stand-in, in which time passes

    def advance(self, seconds: float) -> None:
        until = self.clock + seconds
        while self.events and self.events[0][0] <= until:
            moment, _, event = heapq.heappop(self.events)
            self.clock = max(self.clock, moment)
            event()
        self.clock = max(self.clock, until)

    def create(self, request: Request) -> None:
        if request.foreign:
            return super().create(request)
        self.bought_after_delete += bool(self.deleted)
        last = "FAILED" if self.failing else "ACTIVE"
        self.failing = max(0, self.failing - 1)
        request.state = self.random.choice(["WAITING_FOR_RESOURCES", "PROVISIONING", last])
        self.requests[request.name] = request
        if request.state == "ACTIVE":
            self.provide(request)
        if request.state == "WAITING_FOR_RESOURCES":
            self.at(self.clock + self.random.uniform(0, 1200), lambda: self.change(request, "PROVISIONING"))
        if request.state != last:
            self.at(self.clock + self.random.uniform(1200, 1500), lambda: self.change(request, last))
        return None

    def change(self, request: Request, state: str) -> None:
        if self.request() is not request:
            return
        request.state = state
        if state == "ACTIVE":
            self.provide(request)

    def remove(self, name: str) -> None:
        self.interrupt()
        super().remove(name)

    def answer(self, program: str, words: list[str]) -> tuple[int, str, str]:
        if program == "gcloud" and words[0] == "compute":
            self.advance(self.random.uniform(1, 240 if words[3] in ("ssh", "scp") else 10))
            if self.clock < self.out_of_sight:
                self.calls.append(words)
                return 1, "", "ERROR: gcloud crashed (TransportError): Unable to find the server\n"
        return super().answer(program, words)

    def tpu_vm(self, verb: str, words: list[str]) -> tuple[int, str, str]:
        if verb in ("ssh", "scp"):
            self.dropped = int(self.clock < self.unreachable)
            if "pod_worker.sh start" in flag(words, "--command"):
                for home in self.homes("pod"):
                    if self.trainer(home) is None:
                        (home / "waits").unlink(missing_ok=True)
            home = self.homes("pod")[0]
            if "pod_worker.sh follow" in flag(words, "--command") and self.trainer(home):
                while self.trainer(home) and not self.dropped:
                    self.advance(self.events[0][0] - self.clock)
                    self.dropped = int(self.clock < self.unreachable)
        answer = super().tpu_vm(verb, words)
        self.started_all()
        return answer

    def close(self) -> None:
        self.bystander.kill()
        self.bystander.wait()
        super().close()
