"""One model over several processes: ranks, their layout, and tensor, pipeline, expert and context
parallel forward passes."""
