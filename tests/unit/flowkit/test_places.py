from pathlib import Path

import pytest

from flextrain.config import Config
from flextrain.errors import ConfigError
from flextrain.flowkit.places import effective_config, settle
from flextrain.flowkit.refs import Launch


def values(**sections: dict[str, object]) -> dict[str, object]:
    return Config.model_validate(sections).model_dump(mode="json")


def test_a_local_run_lives_below_the_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launch = settle(values(), num_nodes=2, datastore_root="/somewhere/.metaflow")
    assert launch.run_root("17") == f"{tmp_path}/runs/default/17"


def test_a_run_lives_beside_metaflows_data_where_that_is_a_bucket() -> None:
    launch = settle(values(main={"experiment_name": "e"}), num_nodes=2, datastore_root="s3://bucket/metaflow/")
    assert launch.run_root("17") == "s3://bucket/metaflow/flextrain/e/17"


def test_the_configured_storage_wins() -> None:
    launch = settle(values(checkpoint={"storage": "s3://mine/x"}), num_nodes=2, datastore_root="s3://bucket/metaflow")
    assert launch.experiment_url == "s3://mine/x/default"


def test_every_step_works_with_what_start_settled() -> None:
    launch = Launch("s3://b/flextrain/e", 4, "spot")
    config = effective_config(values(main={"experiment_name": "e"}), launch)
    assert (config.cost.capacity, config.flow.num_nodes, config.checkpoint.storage) == ("spot", 4, "s3://b/flextrain")
    assert settle(config.model_dump(mode="json"), num_nodes=4) == launch


def test_spot_can_be_asked_for_per_run_on_this_machine() -> None:
    assert settle(values(), num_nodes=1, use_spot_instances=True).capacity == "spot"
    assert settle(values(), num_nodes=1).capacity == "on_demand"
    assert settle(values(cost={"capacity": "spot"}), num_nodes=1).capacity == "spot"


def test_on_kubernetes_spot_must_agree_with_the_deployed_requests() -> None:
    with pytest.raises(ConfigError, match=r"cost\.capacity: on_demand") as caught:
        settle(values(flow={"kubernetes": True}), num_nodes=2, use_spot_instances=True)
    assert "cost.capacity: spot" in caught.value.remedy
    agreed = values(flow={"kubernetes": True}, cost={"capacity": "spot"})
    assert settle(agreed, num_nodes=2, use_spot_instances=True).capacity == "spot"


@pytest.mark.parametrize(("num_nodes", "kubernetes"), [(0, False), (-1, False), (1, True)])
def test_a_gang_that_metaflow_cannot_form_is_refused(num_nodes: int, kubernetes: bool) -> None:
    with pytest.raises(ConfigError, match=f"--num-nodes {num_nodes}"):
        settle(values(flow={"kubernetes": kubernetes}), num_nodes=num_nodes)
