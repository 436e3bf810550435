"""See the collectives of your own torch.distributed program, one span a call, in the store.

Start a collector, then the program on two ranks, and ask the store in Python:

    perfledger collect --store ./perfledger-data &
    OTEL_SERVICE_NAME=my-training torchrun --nproc-per-node 2 examples/observe_collectives.py

    from perfledger.schema.store import Store
    calls = Store.at("./perfledger-data").collect("collectives")
    print(calls.select("rank", "step_seq", "op", "group", "bytes", "wire_bytes"))

Where the spans go is OpenTelemetry's to say: OTEL_EXPORTER_OTLP_ENDPOINT and the like.
"""

import torch
import torch.distributed as dist
from torch import nn

from perfledger.instrumented_runtime import observe_collectives

STEPS, WIDTH, SEQUENCES = 6, 64, 16


def main() -> None:
    dist.init_process_group("gloo")  # NCCL on CUDA, as your program does
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = (nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())

    # `full` sees what only C++ calls, like the reducer of DDP, at some cost for each operator:
    # here in every third step. What Python calls is seen in all of them.
    with observe_collectives(full=True, every=3) as observed:
        for number in range(STEPS):
            with observed.step(number):
                rows = torch.randn(SEQUENCES, WIDTH)
                loss = (model(rows) - rows).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                mean = loss.detach().clone()
                dist.all_reduce(mean, dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                print(f"step {number}: loss {mean.item():.4f}")
    print(f"rank {dist.get_rank()}: {observed.told} spans, {observed.lost} lost")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
