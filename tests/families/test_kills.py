"""The contract of every family with a pipeline, found by its file: killed by SIGKILL while it saves, a run goes on and
ends equal to the bit."""

from __future__ import annotations

from pathlib import Path

import family_recipes
import forked_runs
import pytest
import tiny_runs
from adapter_runs import assert_equal, tensors_of_files

ADAPTERS = {"full": [], "lora": ["adapter.name=lora", "adapter.rank=2"]}
KILLS = (1, 4, 11)
"""Where processes that follow each other are killed: at so many openings and renamings of files of checkpoints. The
first leaves no checkpoint, the second a part of one, and the third reads what there is and is killed later."""


@pytest.mark.long
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", family_recipes.NAMES)
def test_killed_while_it_saves_a_run_goes_on_to_the_bit(name: str, adapter: str, tmp_path: Path) -> None:
    sections = {"training": {"duration": "6 steps"}, "checkpoint": {"every": "2 steps", "export": True}}
    recipe, run, whole = family_recipes.write(name, tmp_path, **sections), tmp_path / "run", tmp_path / "whole"

    def started(**more: object) -> dict[str, object]:
        given = [*ADAPTERS[adapter], "training.global_batch_size=2"]
        return forked_runs.run(tmp_path, "run", 1, *given, recipe=str(recipe), areas=family_recipes.AREAS, **more)

    first = {"copies": [[str(run), str(whole)]], "drops": [str(run)]}
    killed = [{"kill": count, "in": str(run / "checkpoints")} for count in KILLS]
    plan = [started(), started(**first, **killed[0]), *(started(**one) for one in killed[1:]), started()]
    codes = forked_runs.together(tmp_path, plan)
    assert codes == [[0], *[[-9]] * len(KILLS), [0]], (tmp_path / "run.seen.log-0").read_text()[-2000:]
    tiny_runs.assert_equal(run, tiny_runs.outcome(whole))
    files = tensors_of_files(whole / "adapter") or tensors_of_files(whole / "pipeline")
    assert files
    assert_equal(tensors_of_files(run / "adapter") or tensors_of_files(run / "pipeline"), files)
