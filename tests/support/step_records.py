"""Record of a step as in the log."""

from megatron_packed.reporting.step_record import MemoryFigures, StepFacts, step_record


def record(
    iteration: int, loss: float = 2.0, *, skip_reason=None, graphs=None, experts=None, offload=None
):
    facts = StepFacts(
        iteration=iteration,
        learning_rate=1e-3,
        real_tokens=900,
        target_tokens=500,
        padded_tokens=100,
        consumed_tokens=900 * iteration,
        num_seqs=12,
        num_packs=4,
        epoch=0,
        flops=4e12,
        plan_hash="abc",
        graphs=graphs,
        offload=offload,
    )
    values = {"loss": loss, "aux_loss": 0.0, "grad_norm": 1.0, "skip_reason": skip_reason}
    return step_record(
        facts,
        **values,
        seconds=0.5,
        world_size=2,
        peak=16e12,
        experts=experts,
        memory=MemoryFigures(used=1.5, reserved=2.0, host=0.5),
    )
