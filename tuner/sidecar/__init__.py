"""The sidecar: a campaign beside a running proxy. It moves bytes and time; `tuner.campaign` decides."""

from tuner.sidecar.bootstrap import SidecarOptions, run_sidecar
from tuner.sidecar.progress import Reporter

__all__ = ["Reporter", "SidecarOptions", "run_sidecar"]
