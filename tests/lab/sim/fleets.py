"""The fleet of most simulator tests: three regions, as regions.yaml has them."""

from __future__ import annotations

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.faults.scenarios import with_accurate_priors
from gorgo.lab.sim.fleet import SimFleet, SimReplica
from gorgo.lab.sim.network import Link

REGIONS = {"us-ashburn": 0.002, "eu-frankfurt": 0.095, "ap-seoul": 0.180}


def three_regions(**regions_s: float) -> SimFleet:
    """One 2x L40S replica per region, `<region>-0`, the Router told the truth."""
    profile = find_profile("2xL40S-Qwen3.5-35B-A3B-FP8-estimate")
    replicas = [
        SimReplica(ReplicaSpec(f"{region}-0", region, accelerator=profile.accelerator), profile, Link(rtt_s=rtt_s))
        for region, rtt_s in (regions_s or REGIONS).items()
    ]
    return with_accurate_priors(SimFleet(tuple(replicas)))
