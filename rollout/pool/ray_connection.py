"""Connection of this process to Ray: starts or joins a cluster, checks GPU ownership, and finds room for engines.

    rollout.ray_address    null           starts a cluster of this machine only, which ends with this process
                           here[:port]    the same, open to other hosts that run `ray start --address`
                           host:port      an existing cluster, left running at the end

Ray hands out the GPUs that it counts, from the first on, even if they are in use. So a Ray cluster
started here counts only GPUs that no trainer rank holds, and a joined cluster must do the same on every trainer host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group

from marsrl.rollout.config import HEAD_PORT, is_started_here
from marsrl.rollout.engines.refusals import RankHost
from marsrl.rollout.imports import environment
from marsrl.rollout.pool.addresses import address_towards, own_address, split_address
from marsrl.rollout.pool.ray_faults import check_head, forget_processes
from marsrl.rollout.pool.ray_start import listens_at, own_sigterm, start_head
from marsrl.rollout.pool.recovery import SETTLE_S
from marsrl.rollout.text import last_line

_LOG = logging.getLogger(__name__)
# Logger of ray.init's warning that authentication is on, which is intended: only holders of this machine's token may join.
_AUTHENTICATION_LOG = logging.getLogger("ray._private.authentication.authentication_token_setup")
GPU, CPU = "GPU", "CPU"  # Ray's resource names
_SAY_S = 15.0  # interval between messages while waiting
_PLACED_S = 0.3  # time that Ray takes to reserve free resources


class RayCluster:
    """Connection of this process to Ray. Several pools may share it; the last one to close ends it.

    host: address at which the cluster's hosts reach this process.
    """

    _users = 0
    _started_here = False
    _lock = threading.Lock()

    def __init__(
        self,
        *,
        address: str | None,
        timeout_s: float,
        object_store_mib: int,
        gpus: Sequence[int] = (),
        own_host: str | None = None,
    ) -> None:
        """Connect to Ray.

        address: rollout.ray_address. own_host: sync.host.
        gpus: GPUs of this host, in torch.cuda's order, that actors of a cluster started here may use.

        Raises RuntimeError: the cluster cannot be reached within timeout_s, or its port is taken.
        """
        with RayCluster._lock:
            if not ray.is_initialized():
                _AUTHENTICATION_LOG.setLevel(logging.ERROR)
                with own_sigterm():
                    if address is None or is_started_here(address):
                        start_head(object_store_mib, gpus, listens_at(address, own_host), is_open=address is not None)
                    else:
                        _join(address, timeout_s)
                RayCluster._started_here = True
            RayCluster._users += 1
        self._is_open = True
        self._address = address
        self.host = own_host or _address_here(address)
        self._port = split_address(address, HEAD_PORT)[1] if address is not None else 0

    @property
    def _name(self) -> str:
        if self._address is None:
            return "the Ray cluster of this machine"
        if is_started_here(self._address):
            start = f"ray start --address={self.host}:{self._port} --block"
            return f"the Ray cluster that was started here (other hosts run `{start}`)"
        return f"the Ray cluster at rollout.ray_address={self._address}"

    def check_owners(self, hosts: Sequence[RankHost], *, is_shared: bool) -> None:
        """Raise RuntimeError if Ray would give engines a GPU that a trainer rank of any host holds.

        is_shared: True if engines share the trainer's GPUs (rollout.placement=colocated). Ray must then count exactly these.
        """
        if self._address is None:
            return  # Ray was started by this process, which chose its GPUs.
        counts = Counter[str]()
        for node in _alive():
            counts[node["NodeManagerHostname"]] += int(node["Resources"].get(GPU, 0))
        wrong = []
        for host in hosts:
            ranks, others = range(min(host.num_ranks, host.num_gpus)), range(host.num_ranks, host.num_gpus)
            right, num_counted = ranks if is_shared else others, counts.pop(host.name, 0)
            if host.num_gpus and (num_counted > len(right) or (is_shared and num_counted < len(right))):
                named = ",".join(map(str, right))
                wrong.append(f"{host.name}: Ray counts {num_counted} GPU(s), expected CUDA_VISIBLE_DEVICES={named}")
        if is_shared:
            others_found = ((name, num) for name, num in sorted(counts.items()) if num)
            wrong += [
                f"{name}: Ray counts {num} GPU(s), but the host has no trainer rank" for name, num in others_found
            ]
        if wrong:
            raise RuntimeError(
                f"{self._name} would give engines {'other GPUs than' if is_shared else 'GPUs of'} the trainer's ranks; restart "
                f"Ray there (`ray start`) with the expected GPUs: {'; '.join(wrong)}"
            )

    def await_place(self, name: str, resources: Mapping[str, float], num: int, wait_s: float) -> None:
        """Wait for room for `num` engines: hosts may still have to join.

        name: the engines, for messages.
        resources: resources of one host that an engine takes: {"GPU": 2.0}, {"CPU": 4.0}, or nothing.

        Raises RuntimeError: no room within wait_s; lists each host's resources.
        """
        for resource, amount in resources.items():
            end, within_s = time.monotonic() + wait_s, SETTLE_S
            while not self.has_place({resource: amount}, min(within_s, end - time.monotonic()), num):
                left, within_s = end - time.monotonic(), _SAY_S
                on_one = f", {amount:g} on one host for each" if amount > 1 else ""
                lack = (
                    f"no room for {name}: {amount * num:g} {resource}(s) needed{on_one}, but {self._name} has "
                    f"{ray.cluster_resources().get(resource, 0.0):g}: {_held(resource)}"
                )
                if left <= 0:
                    raise RuntimeError(
                        f"{lack}; lower rollout.engines, or start Ray on more hosts within rollout.join_s"
                    )
                _LOG.warning("%s; waiting for hosts to join, %.0f s left of rollout.join_s", lack, left)

    def has_place(self, resources: Mapping[str, float], within_s: float, num: int = 1) -> bool:
        """Return True if there is room for `num` engines within within_s. resources: as in await_place."""
        if not resources:
            return True
        end = time.monotonic() + max(within_s, _PLACED_S)
        group = placement_group([dict(resources)] * num)  # Ray decides what fits on which host
        try:
            while placement_group_table(group)["state"] != "CREATED":
                check_head()
                if time.monotonic() >= end:
                    return False
                time.sleep(_PLACED_S / 6)  # PlacementGroup.wait would wait for whole seconds
            return True
        finally:
            remove_placement_group(group)

    def close(self) -> None:
        """Disconnect; the last user of a connection made here shuts Ray down."""
        if not self._is_open:
            return
        self._is_open = False
        with RayCluster._lock:
            RayCluster._users -= 1
            if RayCluster._users == 0 and RayCluster._started_here:
                RayCluster._started_here = False
                forget_processes()
                ray.shutdown()


def cluster_view(address: str, timeout_s: float) -> str:
    """Describe the resources of the cluster at an address: GPUs and CPUs of each host, and how many are free.

    Raises RuntimeError: joining fails within timeout_s.
    """
    with contextlib.closing(RayCluster(address=address, timeout_s=timeout_s, object_store_mib=0)):
        return f"{len(_alive())} node(s) at {address}; {_held(GPU)}; {_held(CPU)}"


def _alive() -> list[Mapping[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _held(resource: str) -> str:
    """List hosts with their amount of a resource, and how much of it is free."""
    hosts = [
        f"{node['NodeManagerHostname']} {node['Resources'][resource]:g}"
        for node in _alive()
        if node["Resources"].get(resource)
    ]
    free = ray.available_resources().get(resource, 0.0)
    return f"{', '.join(hosts)} ({free:g} free)" if hosts else f"no host with {resource}(s)"


def _address_here(address: str | None) -> str:
    """Return the address at which hosts of the cluster at `address` reach this process."""
    if address is None:
        return "127.0.0.1"
    return (not is_started_here(address) and address_towards(split_address(address, HEAD_PORT)[0])) or own_address()


def _join(address: str, timeout_s: float) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if address != "auto":
        try:
            socket.create_connection(split_address(address, HEAD_PORT), timeout=timeout_s).close()
        except OSError as error:
            raise RuntimeError(
                f"rollout.ray_address is {address}, but nothing answers there ({error}); start Ray there with `ray start "
                "--head`, correct the address, set rollout.ray_address=here to start a cluster that other hosts join, or omit "
                "it to use this machine only"
            ) from error
    try:
        # Limit joining to one attempt, which takes about 40 s; the default is 20 attempts.
        with environment(RAY_gcs_server_port_wait_time_s="1"):
            ray.init(address=address, log_to_driver=False, configure_logging=False)
    except Exception as error:
        raise RuntimeError(
            f"rollout.ray_address is {address}, but joining a Ray cluster there failed ({last_line(error)}); check that it runs "
            f"the same Ray ({ray.__version__}) and Python. If it demands a token, set RAY_AUTH_MODE=token and copy its "
            "~/.ray/auth_token to this host"
        ) from error
