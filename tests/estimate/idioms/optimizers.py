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


# %% fused adam
train(torch.optim.AdamW(net.parameters(), fused=True))

# %% foreach adam
train(torch.optim.Adam(net.parameters(), foreach=True, amsgrad=True))

# %% adafactor
train(torch.optim.Adafactor(net.parameters()))

# %% lbfgs with a closure
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)


def closure():
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    return loss


for _ in range(3):
    optimizer.step(closure)

# %% groups with and without decay
decayed = [p for p in net.parameters() if p.dim() > 1]
others = [p for p in net.parameters() if p.dim() <= 1]
train(torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}]))

# %% cosine schedule with warm-up
optimizer = torch.optim.AdamW(net.parameters())
warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
cosine = lr_scheduler.CosineAnnealingLR(optimizer, 10)
train(optimizer, lr_scheduler.SequentialLR(optimizer, [warm, cosine], [2]))

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

# %% accumulation by hand
optimizer = torch.optim.AdamW(net.parameters())
for i in range(12):
    (F.cross_entropy(net(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()

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

# %% a GAN
judge = nn.Linear(16, 1)
first, second = torch.optim.Adam(net.parameters()), torch.optim.Adam(judge.parameters())
make = nn.Linear(4, 16)
for _ in range(4):
    fake = make(net(x))
    second.zero_grad()
    F.softplus(judge(fake.detach())).mean().backward()
    second.step()
    first.zero_grad()
    F.softplus(-judge(fake)).mean().backward()
    first.step()


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

# %% a penalty on gradients
optimizer = torch.optim.Adam(net.parameters())
for _ in range(3):
    point = x.clone().requires_grad_(True)
    out = net(point)
    (slope,) = torch.autograd.grad(out.sum(), point, create_graph=True)
    (F.cross_entropy(out, y) + slope.norm(2, dim=1).sub(1).pow(2).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()

# %% per-sample gradients by torch.func
from torch.func import functional_call, grad, vmap

optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def loss_of(weights, x, y):
        return F.cross_entropy(functional_call(net, weights, (x[None],)), y[None])

    each = vmap(grad(loss_of), (None, 0, 0))(weights, x, y)
    for name, p in net.named_parameters():
        p.grad = each[name].mean(0)
    optimizer.step()
