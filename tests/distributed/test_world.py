"""What launchers say, and what they cannot mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daguerre.distributed.launch.environment import World, first_node, read
from daguerre.distributed.settings import DistributedSettings
from daguerre.errors import UserError

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0", "SLURM_PROCID": "13", "SLURM_NTASKS": "16", "SLURM_LOCALID": "5",
    "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "gpu[007-008]",
}  # fmt: skip


def test_nothing_is_one_process():
    assert read({}) == World(0, 0, 1, 1, 1, 0, "none", "", None)
    assert str(read({})) == "one process"
    assert read({"MASTER_ADDR": "left over", "SLURM_CONF": "/etc"}).size == 1


def test_torchrun():
    world = read(TORCHRUN)
    assert world == World(5, 1, 8, 4, 2, 1, "torchrun", "node1", 29500)
    assert str(world) == "8 processes (2 nodes x 4, by torchrun)"


def test_srun():
    world = read(SRUN)
    assert world == World(13, 5, 16, 8, 2, 1, "slurm", "gpu007", 12000 + 123456 % 16000)
    assert read({**SRUN, "MASTER_ADDR": "gpu009", "MASTER_PORT": "5000"}).address == "gpu009"
    assert read({**SRUN, "MASTER_PORT": "5000"}).port == 5000


def test_a_step_of_a_larger_job():
    """`srun --ntasks 2 --nodes 1` inside a job of 16 tasks."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu008"}
    world = read({**SRUN, **step, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_ID": "3"})
    assert (world.size, world.nodes, world.address, world.port) == (2, 1, "gpu008", 12000 + (123456 + 291) % 16000)


MPI = {
    "mpirun of Open MPI": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
    "MPICH, Intel MPI": {"PMI_SIZE": "2", "PMI_RANK": "0"},
    "MVAPICH": {"MV2_COMM_WORLD_SIZE": "2"},
    "MVAPICH 3": {"MVP_COMM_WORLD_SIZE": "2"},
    "jsrun": {"JSM_NAMESPACE_SIZE": "6"},
    "prterun": {"PMIX_RANK": "1"},
}


@pytest.mark.parametrize("launcher", MPI)
def test_ranks_of_mpi_are_refused_where_they_would_train_alone(launcher):
    variables = MPI[launcher]
    name = next(iter(variables))
    with pytest.raises(
        UserError, match=rf"{name}={variables[name]}: MPI.*each would train alone.*torchrun.*WORLD_SIZE=1"
    ):
        read(variables)
    assert read({**variables, **TORCHRUN}).size == 8  # a script has set them for each rank
    assert read({**variables, "WORLD_SIZE": "1"}).size == 1
    if "PMIX_RANK" not in name:
        assert read({name: "1", "PMIX_RANK": "0"}).size == 1
        assert read({**SRUN, name: "16", "PMIX_RANK": "13"}).size == 16  # srun --mpi=pmi2 or pmix
        with pytest.raises(UserError, match=f"{name}=32: MPI"):  # mpirun's daemons are srun's tasks
            read({**SRUN, name: "32"})


def test_a_shell_of_srun_with_pmix_is_one_process():
    assert read({"PMIX_RANK": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "1"}).size == 1
    assert read({**SRUN, "PMIX_RANK": "13", "PMI_SIZE": "1"}).size == 16


@pytest.mark.parametrize(
    "shell",
    [
        {},  # salloc
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},  # the batch script
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "4294967290"},  # salloc's interactive step
    ],
)
def test_a_shell_of_a_job(shell):
    assert read({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", **shell}).size == 1
    with pytest.raises(UserError, match=r"SLURM_NTASKS=8, but srun did not start this process .*put `srun` before"):
        read({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", **shell})


def test_torchrun_inside_of_srun():
    one_a_node = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
    assert read({**SRUN, **one_a_node, **TORCHRUN}).launcher == "torchrun"
    in_batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    assert read({**in_batch, **TORCHRUN}).rank == 5


def test_srun_inside_of_torchrun():
    with pytest.raises(UserError, match=r"two launchers at once: torchrun set RANK=5.*srun set SLURM_PROCID=13"):
        read({**SRUN, **TORCHRUN})


def test_a_script_that_fills_torchruns_names_from_slurms():
    filled = {"RANK": "13", "WORLD_SIZE": "16", "LOCAL_RANK": "5", "MASTER_ADDR": "gpu007", "MASTER_PORT": "1234"}
    assert read({**SRUN, **filled}) == World(13, 5, 16, 8, 2, 1, "slurm", "gpu007", 1234)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 in the environment, but not RANK, LOCAL_RANK, LOCAL_WORLD_SIZE"),
        ({"RANK": "0"}, "RANK=0 in the environment, but not WORLD_SIZE"),
        ({**TORCHRUN, "RANK": "x"}, "RANK='x' in the environment is not a number"),
        ({**TORCHRUN, "RANK": "9"}, "RANK=9, WORLD_SIZE=8"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "are inconsistent"),
        ({**TORCHRUN, "GROUP_RANK": "0"}, "GROUP_RANK=0"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"}, "WORLD_SIZE=8 is not a multiple of LOCAL_WORLD_SIZE=3"),
        ({**SRUN, "SLURM_NODEID": ""}, "but not SLURM_NODEID"),
        ({**SRUN, "SLURM_NTASKS": "15"}, "every node must run as many tasks"),
        ({**SRUN, "SLURM_PROCID": "11"}, "--distribution=block"),
        ({**SRUN, "SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not set"),
        ({**SRUN, "SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set"),
        ({**SRUN, "SLURM_JOB_NODELIST": "gpu[8-"}, "gpu[8-"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(environ, said):
    with pytest.raises(UserError) as refused:
        read(environ)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("node1", "node1"),
        ("a,b-2,c.d", "a"),
        ("node[001-003,007]", "node001"),
        ("node[9-11]", "node9"),
        ("r[1-2]n[01-02],x", "r1n01"),
        ("gpu-[a,b]-1", "gpu-a-1"),
        ("n[1-2]-ib", "n1-ib"),
        ("n[099-101]", "n099"),
    ],
)
def test_lists_of_nodes(text, name):
    assert first_node(text) == name


@pytest.mark.parametrize("text", ["", "a,,b", "a[1-2", "a]1", "a[1-]", "a[]", "a[[1]]"])
def test_lists_that_nobody_can_read(text):
    with pytest.raises(UserError):
        first_node(text)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20, unique=True), st.integers(3, 5))
def test_the_first_of_every_list_comes_back(numbers, width):
    names = [f"n{number:0{width}d}" for number in numbers]
    assert first_node("n[" + ",".join(name[1:] for name in names) + "]") == names[0]


@pytest.mark.parametrize("url", ["env://", "tcp://node1:29500", "tcp://[::1]:80", "file:///shared/new"])
def test_places_to_meet(url):
    assert DistributedSettings(dist_url=url).dist_url == url


@pytest.mark.parametrize("url", ["tcp://node1", "tcp://:80", "tcp://a:99999", "file://rel", "file:///", "http://a:1"])
def test_places_that_are_none(url):
    with pytest.raises(ValueError, match="tcp://HOST:PORT"):
        DistributedSettings(dist_url=url)


def test_torchs_time_out_comes_last():
    with pytest.raises(ValueError, match="torch's own time-out comes first"):
        DistributedSettings(timeout_seconds=100)
    assert DistributedSettings(dist_url="tcp://[::1]:80").address == ("::1", 80)
