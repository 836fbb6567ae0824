"""Measures on tensors, one question a file.

How strongly does a row answer to its scores?   sensitivity, softmax_jacobian_norm, ...
How concentrated is an attention?               concentration, entropy_nats, p_max, ...
How evenly does a head answer to its weights?   jacobian_condition, jacobian_bound, ...
How far can it carry a small change?            lipschitz_interval, lipschitz_bound, ...
Does a LayerNorm contract, and a block keep?    layer_norm_contraction, residual_jacobian, ...
What do the weights alone say?                  attention_spectra, matrix_spectra, ...
What does a training curve say?                 find_spikes, divergence_step, ...

docs/measures.md shows each number on a trained model, with its equation and its convention.
"""

from levelhead.measure.attention_rows import attention_head_similarity, attention_sensitivity
from levelhead.measure.concentration import Concentration, concentration, row_quantiles
from levelhead.measure.conditioning import Conditioning
from levelhead.measure.curves import (
    Crossing,
    MedianInterval,
    divergence_step,
    epochs_to_target,
    first_nonfinite,
    median_interval,
)
from levelhead.measure.head import HeadForm
from levelhead.measure.induction import induction_weights
from levelhead.measure.jacobian import (
    jacobian_condition,
    jacobian_conditions,
    operator_condition,
)
from levelhead.measure.layernorm import (
    LayerNormContraction,
    layer_norm_contraction,
    layer_norm_jacobian,
    residual_jacobian,
)
from levelhead.measure.lipschitz import block_rms_norm, lipschitz_bound, local_lipschitz_bound
from levelhead.measure.lipschitz_interval import (
    LipschitzInterval,
    lipschitz_found,
    lipschitz_interval,
)
from levelhead.measure.row_statistics import (
    effective_keys,
    entropy_nats,
    head_similarity,
    negative_mass,
    normalized_entropy,
    p_max,
    row_mass,
    sink_mass,
)
from levelhead.measure.sensitivity import Sensitivity, sensitivity, sink_sensitivity
from levelhead.measure.softmax_norm import softmax_jacobian_norm
from levelhead.measure.spectra import (
    AttentionSpectra,
    FusedSpectra,
    MatrixSpectra,
    attention_spectra,
    effective_rank,
    matrix_spectra,
    stable_rank,
)
from levelhead.measure.spikes import Spikes, find_spikes, is_spike, running_spikes, spike_score
from levelhead.measure.streaming import AttentionScores, first_tokens
from levelhead.measure.surrogate import (
    JacobianBound,
    JacobianSurrogate,
    jacobian_bound,
    jacobian_surrogate,
)

__all__ = [
    # An attention, of which no T x S matrix is ever held: the measures below take it or rows.
    "AttentionScores",
    "first_tokens",
    # Sensitivity: theta of each row, in certified bounds.
    "sensitivity",
    "sink_sensitivity",
    "attention_sensitivity",
    "softmax_jacobian_norm",
    "Sensitivity",
    # Concentration: all at once, streaming; or one at a time on rows, as a loss if wanted.
    "concentration",
    "Concentration",
    "row_quantiles",
    "entropy_nats",
    "normalized_entropy",
    "p_max",
    "effective_keys",
    "sink_mass",
    "row_mass",
    "negative_mass",
    "head_similarity",
    "attention_head_similarity",
    "induction_weights",
    # Conditioning of the Jacobian: kappa, the bound that holds, the papers' surrogate.
    "jacobian_condition",
    "jacobian_conditions",
    "operator_condition",
    "Conditioning",
    "HeadForm",
    "jacobian_bound",
    "JacobianBound",
    "jacobian_surrogate",
    "JacobianSurrogate",
    # Lipschitz constants: bound >= truth >= found.
    "lipschitz_interval",
    "LipschitzInterval",
    "lipschitz_bound",
    "local_lipschitz_bound",
    "lipschitz_found",
    "block_rms_norm",
    # LayerNorm and residual blocks.
    "layer_norm_jacobian",
    "layer_norm_contraction",
    "LayerNormContraction",
    "residual_jacobian",
    # Spectra of the weights.
    "attention_spectra",
    "AttentionSpectra",
    "FusedSpectra",
    "matrix_spectra",
    "MatrixSpectra",
    "stable_rank",
    "effective_rank",
    # Training curves.
    "find_spikes",
    "running_spikes",
    "is_spike",
    "Spikes",
    "spike_score",
    "first_nonfinite",
    "divergence_step",
    "epochs_to_target",
    "Crossing",
    "median_interval",
    "MedianInterval",
]
