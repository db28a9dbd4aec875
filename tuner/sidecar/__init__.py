"""The sidecar: a campaign beside a running proxy. It moves bytes and time; `tuner.campaign` decides."""

from tuner.sidecar.bootstrap import run_sidecar
from tuner.sidecar.options import SidecarOptions
from tuner.sidecar.progress import Reporter

__all__ = ["Reporter", "SidecarOptions", "run_sidecar"]
