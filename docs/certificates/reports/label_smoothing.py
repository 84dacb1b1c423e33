"""Megatron-LM issues 737 and 7452, finding 1: label smoothing by the vocabulary's part of a rank."""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from shardwise.certify.engines.megatron import *  # noqa: F403
from shardwise.certify.engines.megatron import OnCPU, finalize_model_grads
from shardwise.certify.tiny import SEQ

variants = ("plain",)
SMOOTHING = 0.1


def loss(logits, labels):
    """1 - SMOOTHING for the label, the rest spread evenly over all others."""
    logs, share = F.log_softmax(logits.flatten(0, 1), -1), SMOOTHING / (logits.shape[-1] - 1)
    right = logs.gather(1, labels.flatten()[:, None])[:, 0]
    return -((1 - SMOOTHING - share) * right + share * logs.sum(1)).sum()


def backward(run, ids, labels, tokens):
    with OnCPU(run.layout):
        logits = run.engine(ids, torch.arange(SEQ).expand_as(ids), None).transpose(0, 1).contiguous()
        value = vocab_parallel_cross_entropy(logits, labels.T.contiguous(), SMOOTHING).sum()
        value.backward()
        finalize_model_grads([run.engine], num_tokens=torch.tensor(labels.numel()))
    return value.item() / tokens
