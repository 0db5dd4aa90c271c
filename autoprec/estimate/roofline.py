"""The roofline of a target: an op takes as long as its arithmetic, its bytes or its launch, whichever is longest."""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.errors import TargetError
from autoprec.formats import get_format
from autoprec.target import Target

#: Shares of a published peak that large kernels reach, an assumption: published ones of large products on an H100 lie
#: between 0.6 and 0.8.  A target's measured peaks are what kernels reached already.
PEAK_SHARE, BANDWIDTH_SHARE = 0.75, 0.9

#: Seconds that one kernel takes at least, an assumption: on a GPU its launch, which takes some microseconds
#: (https://developer.nvidia.com/blog/cuda-graphs/), on a CPU the framework's call.
LAUNCH_S = {"cpu": 5e-6}
GPU_LAUNCH_S = 5e-6


@dataclass(frozen=True, slots=True)
class Roofline:
    """What a target's kernels reach.

    Raises:
        TargetError: from :meth:`seconds`, where a number that is needed isn't known.
    """

    target: Target

    def seconds(self, num_bytes: float, flops: float = 0.0, format_name: str = "fp32") -> float:
        """One kernel that moves these bytes and computes these FLOPs in a format."""
        arithmetic = flops / self.peak(format_name) if flops else 0.0
        return max(arithmetic, num_bytes / self.bandwidth, self.launch_s)

    def peak(self, format_name: str) -> float:
        """FLOP/s that large products reach in a format.

        Raises:
            TargetError: the peak isn't known.
        """
        return self.target.peak(format_name) * (1.0 if self.target.measured else PEAK_SHARE)

    @property
    def bandwidth(self) -> float:
        """Bytes/s that large copies reach.

        Raises:
            TargetError: it isn't known.
        """
        rate = self.target.bandwidth_bytes_per_s
        if rate is None:
            raise TargetError(f"the bandwidth of {self.target.name} isn't known, so that no time can be estimated")
        return rate * (1.0 if self.target.measured else BANDWIDTH_SHARE)

    @property
    def launch_s(self) -> float:
        """Seconds of a kernel that does nothing."""
        return LAUNCH_S.get(self.target.kind, GPU_LAUNCH_S)


def bytes_of(format_name: str) -> float:
    """Bytes a number in memory; half of one in a 4-bit format."""
    return get_format("fp32" if format_name == "tf32" else format_name).bits / 8
