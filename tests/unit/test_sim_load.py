"""The workload: reproducible, assorted, with the shares that were asked for."""

from kvflow.sim.load import LoadConfig, plan_load


def test_the_same_seed_gives_the_same_transfers() -> None:
    config = LoadConfig(transfers=50, aborts=5)
    assert list(plan_load(config)) == list(plan_load(config))
    assert list(plan_load(config)) != list(plan_load(LoadConfig(transfers=50, aborts=5, seed=2)))


def test_lengths_prefixes_and_aborts_are_as_asked() -> None:
    config = LoadConfig(transfers=300, aborts=20, shortest=8, longest=900)
    plan = list(plan_load(config))
    assert len(plan) == 320
    assert sum(item.abort_after_s is not None for item in plan) == 20
    lengths = [len(item.prompt) for item in plan]
    assert min(lengths) >= 8
    assert max(lengths) <= 900
    assert max(lengths) > 400
    assert sum(length < 85 for length in lengths) > 100, "log-uniform: half of the prompts are short"
    beginnings = [tuple(item.prompt[:8]) for item in plan if len(item.prompt) > 8]
    shared = sum(beginnings.count(beginning) > 1 for beginning in beginnings)
    assert 60 < shared < 140
    assert 40 < sum(item.late for item in plan) < 120
