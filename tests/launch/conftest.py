"""The fixture of the tests of launch/tpu_pod.sh."""

import pytest
from pod_launcher import PodCloud, make_checkout


@pytest.fixture
def cloud(tmp_path):
    """A checkout whose launcher runs against a stand-in for Cloud TPUs."""
    cloud = PodCloud(tmp_path, make_checkout(tmp_path / "checkout"))
    yield cloud
    cloud.close()
