"""The sidecar: a campaign beside a running proxy. Bytes and time; what is decided, is decided in `tuner.campaign`."""

from tuner.sidecar.bootstrap import SidecarOptions, run_sidecar
from tuner.sidecar.progress import Reporter

__all__ = ["Reporter", "SidecarOptions", "run_sidecar"]
