import torch
import torch.nn.functional as F
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
optimizer = torch.optim.AdamW(net.parameters())
x, y = torch.randn(8, 16, device=device), torch.randint(0, 4, (8,)).cuda()


def step():
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# %% measured by events and memory
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
for _ in range(3):
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    print(start.elapsed_time(end), torch.cuda.max_memory_allocated() / 2**20)

# %% autocast and a scaler for cuda
scaler = torch.cuda.amp.GradScaler()
for _ in range(3):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()

# %% bf16 on cuda, if it has it
if torch.cuda.is_bf16_supported():
    net, x = net.bfloat16(), x.bfloat16()
for _ in range(3):
    step()

# %% a rank of nccl
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(0)
net = nn.parallel.DistributedDataParallel(net, device_ids=[0])
for _ in range(3):
    step()
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
dist.barrier()

# %% values that are given for the device
weights = torch.tensor([1.0, 2.0, 1.0, 1.0], device=device)
nothing = torch.tensor([], device=device)
assert torch.cat([nothing, weights, x.new_tensor([1.0])]).device == x.device
for _ in range(3):
    F.cross_entropy(net(x), torch.as_tensor([0] * 8, device=device), weights).backward()
    optimizer.step()

# %% tied weights are found by their addresses
net[2].weight = nn.Parameter(torch.zeros(4, 32, device=device))
addresses = {one.data_ptr() for one in net.parameters()}
assert len(addresses) == len([*net.parameters()])
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(3):
    step()

# %% the accelerator of torch, whichever it is, and pinned batches
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
assert str(device) == "cuda" and torch.accelerator.device_count() > 0
data = torch.utils.data.TensorDataset(torch.randn(32, 16), torch.randint(0, 4, (32,)))
for x, y in torch.utils.data.DataLoader(data, 8, pin_memory=True):
    x, y = x.to(device, non_blocking=True), y.to(device)
    step()
torch.accelerator.synchronize()
