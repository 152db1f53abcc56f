"""The pipeline of a projected step, action by action, for pictures and traces."""

from __future__ import annotations

from perfsuite.base.errors import InvalidParameter
from perfsuite.projection.calibration import Calibration
from perfsuite.projection.job import Job
from perfsuite.projection.step import projector_of
from perfsuite.record.step import Timeline
from perfsuite.schedules import StageTimes, make_schedule, simulate


def pipeline_timeline(job: Job, calibration: Calibration) -> Timeline:
    """Simulated with the projected durations; InvalidParameter for a layout without stages."""
    layout = job.layout
    ranks = layout.shape.size("pp")
    if ranks == 1:
        raise InvalidParameter(f"layout {layout} has no pipeline to draw; give it pp2 or more, or leave --trace out")
    stages = projector_of(job, calibration).step(layout).stages
    schedule = make_schedule(
        layout.schedule,
        ranks=ranks,
        num_micro_batches=layout.num_micro_batches,
        stages_per_rank=layout.stages_per_rank,
    )
    times = StageTimes(
        forward_s=tuple(stage.forward.total for stage in stages),
        backward_input_s=tuple(stage.backward_input.total for stage in stages),
        backward_weight_s=tuple(stage.backward_weight.total for stage in stages),
    )
    return simulate(schedule, times, detail=True)
