"""Runs with the TPU's attention kernel, interpreted here, are those with plain arithmetic, dropout included."""

import functools

import numpy as np
import pytest
from toy_runs import copy_at, make_pair_stores, make_stores, metrics, run_here

from jaxlm.nn import layers

pytestmark = pytest.mark.usefixtures("two_devices")

STEPS = 30
# The layers have rows of 64 tokens, and Transformer-XL 64 more of memory.
MAKERS = {"gpt": make_stores, "bert": make_pair_stores, "transformer_xl": make_stores, "t5": make_stores}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Return a function (family, backend, *flags) -> its run of 50 steps."""
    directory = tmp_path_factory.mktemp("kernels")

    @functools.cache
    def stores(maker):
        place = directory / maker.__name__
        place.mkdir()
        return maker(place)

    @functools.cache
    def run(name, backend, copied=None):
        store, valid = stores(MAKERS[name])
        place = directory / f"{name}-{backend}{'-resumed' * (copied is not None)}"
        if copied is not None:
            copy_at(copied, STEPS // 2, place)
        flags = f"--num-steps {STEPS} --checkpoint-every {STEPS // 2} --eval-every {STEPS} --batch-size 8".split()
        # The sums of two programs differ in their last bits, and a high learning rate doubles that in a few steps.
        flags += f"--execution.attention {backend} --optimizer.peak-lr 3e-4".split()
        flags += ["--model.num-layers", 1, *(["--model.num-encoder-layers", 1] if name == "t5" else [])]
        flags += ["--run", place, "--data.store", store, "--data.validation", valid]
        layers.log_once.cache_clear()
        ended = run_here("pretrain", f"debug/{name}", *flags)
        assert ended.code == 0, ended.errors
        assert ("attention is computed by flash" in ended.errors) == (backend == "flash")
        return place

    return run


def losses(run):
    """The losses of the steps of a run."""
    return np.asarray(list(metrics(run, "loss").values()))


CAMPAIGN = {"t5": pytest.mark.campaign}  # its bias has tests beside the kernel


@pytest.mark.parametrize("name", [pytest.param(name, marks=CAMPAIGN.get(name, ())) for name in MAKERS])
def test_thirty_steps_are_those_of_xla(name, pretrained):
    """Fails when a mask, a bias, a distance or a gradient of the kernel is another in a model."""
    found, expected = (losses(pretrained(name, backend)) for backend in ("flash", "xla"))
    assert len(found) == STEPS and expected[0] - expected[-1] > 0.05
    np.testing.assert_allclose(found, expected, rtol=3e-5)


def test_a_run_goes_on_with_another_backend(pretrained):
    """A run from a TPU resumes on a machine without one: fails when its dropout masks then become others."""
    begun = pretrained("gpt", "flash")
    found = losses(pretrained("gpt", "xla", begun))
    np.testing.assert_allclose(found, losses(pretrained("gpt", "xla")), rtol=3e-5)
