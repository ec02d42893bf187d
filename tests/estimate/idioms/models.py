import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))


def train(net, x=x, y=y, lossed=F.cross_entropy, **options):
    optimizer = torch.optim.AdamW(net.parameters(), **options)
    for _ in range(3):
        loss = lossed(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# %% initialised by hand
net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
for module in net.modules():
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
        nn.init.orthogonal_(module.weight)
        nn.init.kaiming_uniform_(module.weight)
train(net)

# %% convolutions and batch norm
net = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 4)
)
train(net, torch.randn(8, 1, 4, 4))


# %% gru cell in a loop
class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        state = x.new_zeros(len(x), 16)
        for part in x.split(4, dim=1):
            state = self.cell(part, state)
        return self.head(state)


train(Loop())


# %% packed sequences
class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        lengths = torch.tensor([4, 4, 3, 3, 2, 2, 1, 1])
        packed = nn.utils.rnn.pack_padded_sequence(x.view(8, 4, 4), lengths, batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(out[:, 0])


train(Packed())


# %% transformer encoder
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        padding = torch.zeros(len(x), 5, dtype=torch.bool)
        return self.head(
            self.encoder(x.unsqueeze(1).repeat(1, 5, 1), src_key_padding_mask=padding)[:, 0]
        )


train(Encoder())

# %% evaluated before and after training
net = nn.Sequential(nn.Linear(16, 4), nn.Dropout(0.1))
for _ in range(2):
    net.eval()
    with torch.no_grad():
        print(F.cross_entropy(net(x), y).item())
    net.train()
    train(net)


# %% causal attention by hand
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 4)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.T).masked_fill(self.mask == 0, float("-inf")).softmax(-1)
        return self.head(scores @ v)


train(Attention())


# %% checkpointed sequence
class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)]
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(checkpoint_sequential(self.blocks, 2, x, use_reentrant=False))


train(Sequence())


# %% frozen backbone, and counted parameters
net = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
net[0].requires_grad_(False)
print(f"{sum(p.numel() for p in net.parameters() if p.requires_grad):,} parameters", net)
train(net)

# %% average of weights
net = nn.Linear(16, 4)
average = torch.optim.swa_utils.AveragedModel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    average.update_parameters(net)

# %% copied teacher
net = nn.Linear(16, 4)
teacher = copy.deepcopy(net).eval()
for p in teacher.parameters():
    p.requires_grad = False
train(net, lossed=lambda out, y: F.mse_loss(out, teacher(x)))


# %% a custom autograd function
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Custom(nn.Linear):
    def forward(self, x):
        return Double.apply(super().forward(x))


train(Custom(16, 4))

# %% compiled in place, and again
net = nn.Linear(16, 4)
net.compile()
train(torch.compile(net))

# %% weight norm and spectral norm
net = nn.Sequential(
    nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
    nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4)),
)
train(net)


# %% mixture of experts
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(16, 4) for _ in range(3))

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        out = x.new_zeros(len(x), 4)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(-1)
            out.index_add_(0, rows, expert(x[rows]))
        return out


train(Experts())

# %% ctc loss
net = nn.Linear(16, 10)
lengths = torch.full((4,), 8)
targets = torch.randint(1, 10, (4, 3))
train(
    net,
    torch.randn(8, 4, 16),
    lossed=lambda out, _: F.ctc_loss(out.log_softmax(-1), targets, lengths, torch.full((4,), 3)),
)

# %% embedding bag with offsets
net = nn.EmbeddingBag(10, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    F.cross_entropy(net(torch.randint(0, 10, (12,)), torch.tensor([0, 4, 8])), y[:3]).backward()
    optimizer.step()
