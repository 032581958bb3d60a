"""The chain with a bucket as datastore and checkpoint store: nothing but refs passes between steps."""

import json
from typing import Any

import pytest
from tests.flows.conftest import Workshop, must, open_workshop
from tests.flows.test_train_flow import look_inside, run_id_of
from tests.support.s3 import Bucket

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture
def workshop(bucket: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    metaflow = {
        "METAFLOW_DEFAULT_DATASTORE": "s3",
        "METAFLOW_DATASTORE_SYSROOT_S3": f"{bucket.url}/metaflow",
        "METAFLOW_S3_WORKER_COUNT": "4",  # its 64 processes are made for real networks
    }
    return open_workshop(tmp_path_factory.mktemp("s3"), {**bucket.environ, **metaflow})


def resumed_steps(bucket: Bucket, events_url: str) -> list[int]:
    """Steps at which the run's ranks went on from a checkpoint, as its events in the bucket say."""
    prefix = events_url.removeprefix(f"{bucket.url}/")
    bodies = [bucket.client().get_object(Bucket=bucket.name, Key=key)["Body"].read() for key in bucket.keys(prefix)]
    events: list[dict[str, Any]] = [json.loads(line) for body in bodies for line in body.splitlines()]
    return [event["fields"]["step"] for event in events if event.get("name") == "resume" and event["rank"] == 0]


def test_a_run_that_was_killed_is_resumed_from_the_bucket(workshop: Workshop, bucket: Bucket) -> None:
    config = workshop.config(
        main={"experiment_name": "e"}, training={"max_steps": 200}, checkpoint={"interval": 20}, flow={"retries": 0}
    )
    words = ["--config-value", "config", config, "run", "--num-nodes", "2"]
    text = workshop.kill_training("train_flow.py", *words, at_step=40, succeeds=False)
    killed = run_id_of(text)

    resumed = must(workshop.flow("train_flow.py", "resume"))
    run_id = run_id_of(resumed.stdout)
    inside = look_inside(workshop, run_id)
    root = f"{bucket.url}/metaflow/flextrain"
    assert inside["checkpoint"].startswith(f"{root}/e/{run_id}/checkpoints/step-00000200")
    assert inside["index"].startswith(f"{root}/indexes/")
    steps = resumed_steps(bucket, inside["events"])
    assert len(steps) == 1
    assert steps[0] >= 20
    assert steps[0] % 20 == 0
    assert bucket.keys(f"metaflow/flextrain/e/{killed}/events/")

    # The evaluation ran in a process of its own; here it runs once more, with every local trace of the run gone.
    workshop.forget_local_files()
    where = ["--checkpoint", inside["checkpoint"], "--index", inside["index"]]
    alone = must(workshop.flow("evaluate_flow.py", "--config-value", "config", config, "run", *where))
    assert f"{inside['report']['loss']:.4f}" in alone.stdout
