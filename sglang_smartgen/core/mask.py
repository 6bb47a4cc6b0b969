"""The three values of the KV mask: what a decode node knows about one token of one layer.

A mask is int8, `[rows, max_len]` a layer, shared by the heads of a token. The values are ordered on
purpose: sorting a row in descending order moves the remote entries to its front (Algorithm 1 of
the SmartGen paper).
"""

from __future__ import annotations

PADDING = 0  # no entry here: beyond the sequence, or a padded token of the batch
LOCAL = 1  # K and V are on the decode node; written only after the bytes behind it have landed
REMOTE = 2  # K and V are still on the prefill node
