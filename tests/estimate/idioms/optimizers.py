import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))


def train(optimizer, scheduler=None):
    for _ in range(3):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


# %% lbfgs with a closure
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)


def closure():
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    return loss


for _ in range(3):
    optimizer.step(closure)

# %% reduce on plateau
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
for _ in range(3):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    plateau.step(loss)

# %% clipping that raises for infinite gradients
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    F.cross_entropy(net(x), y).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
    nn.utils.clip_grad_value_(net.parameters(), 0.5)
    optimizer.step()

# %% gradient scaler
optimizer = torch.optim.AdamW(net.parameters())
scaler = torch.amp.GradScaler("cpu")
for _ in range(3):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


# %% an optimizer of one's own
class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.setdefault(p, {})
                state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p.add_(state["mean"].sign(), alpha=-group["lr"])


train(Signs(net.parameters()))
