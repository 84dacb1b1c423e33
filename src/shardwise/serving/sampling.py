"""Choosing tokens. The random number of a token depends on its request's seed and on its place in the sequence alone:
equal seeds give equal numbers whatever else is being served, and whoever draws. Tokens are equal as far as logits are:
in fp32 but for rounding, while in bf16 and with 8-bit matrices logits differ with the rows that a step computes."""

import torch
from torch import Tensor

from shardwise.decoder import random
from shardwise.serving.messages import NOTHING, Sampling

_FEW = 512
"""Likeliest tokens that are sorted first: mostly the share `top_p` lies among them."""
_AT_ONCE = 1 << 22
"""Logits whose log-probabilities are computed at a time, in fp32."""


def likeliest(logits: Tensor) -> Tensor:
    """The first greatest of each row [B, vocab], int64 [B]. Of logits that are no numbers, or the greatest of which is
    infinite, there is no token: `NOTHING`. On CUDA the host does not wait."""
    tokens = _greatest(logits)
    return tokens.masked_fill(~logits.gather(1, tokens[:, None])[:, 0].isfinite(), NOTHING)


def choose(
    logits: Tensor, samplings: list[Sampling], places: list[int], greedy: Tensor | None = None, *,
    targets: dict[int, int] | None = None, banned: dict[int, tuple[int, ...]] | None = None, top: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(tokens [B], logarithms of their probabilities [B], NaN where they are not wanted; then `top` times the next
    likeliest tokens [B], and as often the logarithms of theirs), all float64 and on the CPU.

    logits: [B, vocab]. places: how many tokens precede each in its sequence. greedy: `likeliest(logits)`, where it is
    there already. Where that is `NOTHING`, the token is, too. targets: row -> the token that it has, whatever is
    likely. banned: row -> tokens that it cannot have.
    """
    targets, allowed = targets or {}, _without(logits, banned) if banned else logits
    greedy = likeliest(allowed) if greedy is None or banned else greedy
    if not (targets or any(sampling.temperature > 0 or sampling.logprobs for sampling in samplings)):
        return greedy.cpu().double(), torch.full((len(samplings),), torch.nan, dtype=torch.float64)
    nothing, tokens = greedy == NOTHING, greedy.clamp(min=0)
    for row, (sampling, place) in enumerate(zip(samplings, places, strict=True)):
        if row in targets:
            tokens[row] = targets[row]
        elif sampling.temperature > 0:
            tokens[row] = _draw(allowed[row], sampling, uniform(sampling.seed, place))
    wanted = [row for row, sampling in enumerate(samplings) if sampling.logprobs or row in targets]
    probabilities = _probabilities(logits, tokens, wanted, top)
    return tokens.masked_fill_(nothing, NOTHING).double().cpu(), *probabilities


def _without(logits: Tensor, banned: dict[int, tuple[int, ...]]) -> Tensor:
    allowed = logits.clone()
    for row, tokens in banned.items():
        allowed[row, [token for token in tokens if token < logits.shape[1]]] = -torch.inf
    return allowed


def _probabilities(logits: Tensor, tokens: Tensor, wanted: list[int], top: int) -> Tensor:
    """Log-probabilities [1 + 2 top, B] of the wanted rows' tokens, then their likeliest tokens and those'. Of a small
    vocabulary, `NOTHING` fills the rest."""
    result = torch.full((1 + 2 * top, len(logits)), torch.nan, dtype=torch.float64)
    result[1 : 1 + top] = NOTHING
    most, at_once = min(top, logits.shape[1]), max(1, _AT_ONCE // logits.shape[1])
    for first in range(0, len(wanted), at_once):
        rows = wanted[first : first + at_once]
        here = logits if len(rows) == len(logits) else logits[rows]
        wide = torch.log_softmax(here, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        result[0, rows] = wide.gather(1, tokens[rows, None])[:, 0].double().cpu()
        if most:
            values, indices = wide.topk(most)
            result[1 : 1 + most, rows] = indices.T.double().cpu()
            result[1 + top : 1 + top + most, rows] = values.T.double().cpu()
    return result


def _greatest(logits: Tensor) -> Tensor:
    """The first greatest of each row. On CPUs numpy's takes a tenth of the time of torch's."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    if logits.dtype != torch.bfloat16:
        return torch.from_numpy(logits.numpy().argmax(-1))
    # numpy knows no bfloat16. Numbers from zero on are in the order of their bits, and above all others.
    bits = logits.view(torch.int16).numpy()
    tokens = bits.argmax(-1)
    for row, token in enumerate(tokens):
        if bits[row, token] < 0:
            tokens[row] = logits[row].float().numpy().argmax()
    return torch.from_numpy(tokens)


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1) for the token at `place` of a request with this seed."""
    return (random.key(seed, "token", place) >> 11) / (1 << 53)


def _draw(logits: Tensor, sampling: Sampling, number: float) -> Tensor:
    """The first token up to which the probabilities of those that count add up to more than `number` of their sum."""
    wide = logits.double()
    # The greatest becomes 0: no temperature is so small that it would be infinite.
    scaled = (wide - wide.max()) / sampling.temperature
    if not sampling.top_k and sampling.top_p == 1:
        return _at(torch.softmax(scaled, -1).cumsum(-1), number)
    indices, sums = _likeliest(scaled, sampling)
    # A token counts where those before it have less than the share.
    kept = 1 + int((sums[:-1] < sampling.top_p).sum())
    return indices[_at(sums[:kept], number)]


def _at(sums: Tensor, number: float) -> Tensor:
    return torch.searchsorted(sums, number * sums[-1], right=True).clamp_(max=len(sums) - 1)


def _likeliest(scaled: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The likeliest tokens in order, and the sums of their probabilities: `top_k` of them, which then are all there
    are, or so many that they have the share `top_p`."""
    if sampling.top_k:
        values, indices = torch.topk(scaled, min(sampling.top_k, len(scaled)))
        return indices, torch.softmax(values, -1).cumsum(-1)
    everything = torch.logsumexp(scaled, -1)
    for count in (min(_FEW, len(scaled)), len(scaled)):
        values, indices = torch.topk(scaled, count)
        sums = (values - everything).exp().cumsum(-1)
        if float(sums[-1]) >= sampling.top_p:
            break
    return indices, sums
