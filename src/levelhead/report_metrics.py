"""What the report says about a metric: its words, its equation, where it is drawn.

A metric's name is a quantity with its unit, then what was taken over the rows
("entropy_nats_q50"). A name that no entry knows is still shown, with its convention alone.
"""

import re
from dataclasses import dataclass

_STATISTIC = re.compile(r"_(q\d{1,3}|mean|median|min|max|std)$")


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A measure as a reader meets it.

    Attributes:
        key: Words of the metric's name, in order ("kappa", "surrogate").
        label: Heading.
        family: Which part of the page shows it.
        equation: In the names of the library; Greek by name, ``_`` and ``^`` as in TeX.
        words: What the number means and which way is healthy.
        is_log: Whether it spans orders of magnitude.
    """

    key: str
    label: str
    family: str
    equation: str
    words: str
    is_log: bool = False


FAMILIES = {
    "sensitivity": "Sensitivity",
    "concentration": "Concentration",
    "scores": "Scores",
    "jacobian": "Jacobian",
    "spectra": "Spectra of the projections",
    "stability": "Norms and bounds",
    "other": "Other measures",
}
"""Name to heading, in the order of the page."""

QUANTITIES = (
    Quantity(
        key="theta", label="sensitivity \u03b8", family="sensitivity",
        equation="theta(p) = 4 max_S p(S) (1 - p(S)),  ||J_softmax||_{inf->1} = theta / tau",
        words="How far a row's weights can move for the smallest push on its scores: 1 is the "
        "most sensitive, 0 a frozen (saturated) row. Certified from below and above.",
    ),
    Quantity(
        key="entropy nats", label="entropy (nats)", family="concentration",
        equation="H = -sum_s p_s ln p_s",
        words="How widely a row spreads its attention. Near 0: one key has it all (collapse). "
        "Near ln(number of visible keys): uniform, the head does not choose.",
    ),
    Quantity(
        key="normalized entropy", label="entropy / most possible", family="concentration",
        equation="H / ln(num_visible)",
        words="Entropy as a share of what the visible keys allow: 0 one-hot, 1 uniform.",
    ),
    Quantity(
        key="p max", label="largest weight p_max", family="concentration",
        equation="p_max = max_s p_s",
        words="Share of a row on its strongest key; 1 is one-hot.",
    ),
    Quantity(
        key="effective keys", label="effective keys", family="concentration",
        equation="(sum_s p_s)^2 / sum_s p_s^2",
        words="How many keys share a row, as a participation ratio.", is_log=True,
    ),
    Quantity(
        key="sink mass", label="sink mass", family="concentration",
        equation="p_sink",
        words="Weight taken by a sink, or by the document's first token, instead of content.",
    ),
    Quantity(
        key="first token mass", label="first-token mass", family="concentration",
        equation="p_{first token}",
        words="Weight on the first real token of each document. A head that rests there "
        "attends to nothing in particular: an attention sink.",
    ),
    Quantity(
        key="induction", label="induction score", family="concentration",
        equation="p_{s + 1},  s = last earlier place of the query's token",
        words="Weight on what followed the query's token the last time. Above 0.25: an induction "
        "head (Olsson et al. 2022), if the tokens are random ones said twice.",
    ),
    Quantity(
        key="row mass", label="row mass", family="concentration",
        equation="sum_s p_s",
        words="Sum of a row: 1 for softmax, less with a sink, alpha_ma for affine weights.",
    ),
    Quantity(
        key="negative mass", label="negative mass", family="concentration",
        equation="sum_s max(0, -attn_weights_s)",
        words="How much of a row is negative; 0 unless the weights are affine.",
    ),
    Quantity(
        key="head similarity max",
        label="most similar other head",
        family="concentration",
        equation="max_{g} mean_t <P_h[t], P_g[t]> / (||P_h[t]|| ||P_g[t]||)",
        words="How alike a head and the closest other head of its layer attend; at 1 one of them "
        "is redundant.",
    ),
    Quantity(
        key="score max", label="largest score", family="scores",
        equation="max_s scale q . k_s",
        words="Scaled, masked scores before softmax. Growth over training is the classical sign "
        "of an attention that will saturate.",
        is_log=True,
    ),
    Quantity(
        key="score std", label="spread of scores", family="scores",
        equation="std_s scale q . k_s",
        words="Near 0 the row is uniform whatever the keys hold; large values saturate it.",
        is_log=True,
    ),
    Quantity(
        key="raw score max", label="largest |q . k| before the scale", family="scores",
        equation="max_s |q . k_s|",
        words="What the dtype of the product must be able to hold.", is_log=True,
    ),
    Quantity(
        key="overflow", label="share of the dtype's range", family="scores",
        equation="max_s |q . k_s| / max(dtype)",
        words="At 1 the product of query and key overflows.", is_log=True,
    ),
    Quantity(
        key="output share", label="a head's share of the output", family="other",
        equation="rms(head) / rms(heads of the layer)",
        words="1 is the layer's usual head; near 0 the head is dead.", is_log=True,
    ),
    Quantity(
        key="hidden abs max", label="largest hidden state", family="stability",
        equation="max |X|",
        words="Largest entry of what the queries read; outliers make int8 hard.", is_log=True,
    ),
    Quantity(
        key="outlier channels", label="outlier channels", family="stability",
        equation="#{channels : |x| >= 6 in 6 % of the tokens}",
        words="Channels that int8 quantisation would have to keep apart (Dettmers et al. 2022).",
    ),
    Quantity(
        key="score", label="scores", family="scores",
        equation="scores = scale q . k",
        words="Scaled, masked scores before softmax.",
    ),
    Quantity(
        key="surrogate", label="the papers' surrogate (not a bound)", family="jacobian",
        equation="kappa(X)^3 kappa(Lambda(P)) kappa(W_V) (kappa(W_Q) + kappa(W_K)) "
        "+ kappa(X) kappa(P)",
        words="The right-hand side printed in the papers, over non-zero singular values. "
        "It is not a bound on \u03ba(J): violations are known.", is_log=True,
    ),
    Quantity(
        key="kappa bound", label="valid bound on \u03ba(J)", family="jacobian",
        equation="sqrt(||PX||^2 + ||X||^2 max_i ||M_i||^2 + ||Q||^2 max_i ||R_i||^2) / "
        "sigma_min(PX)",
        words="Holds wherever P X has full row rank (never for more tokens than width); "
        "infinite where nothing is known.", is_log=True,
    ),
    Quantity(
        key="jacobian bound", label="valid bound on \u03ba(J)", family="jacobian",
        equation="sqrt(||PX||^2 + ||X||^2 max_i ||M_i||^2 + ||Q||^2 max_i ||R_i||^2) / "
        "sigma_min(PX)",
        words="Holds wherever P X has full row rank (never for more tokens than width); "
        "infinite where nothing is known.", is_log=True,
    ),
    Quantity(
        key="jacobian", label="\u03ba(J)", family="jacobian",
        equation="kappa(J) = sigma_max(J) / sigma_min(J),  J = [dA/dW_Q, dA/dW_K, dA/dW_V]",
        words="Condition number of the head's output with respect to its weights, over the "
        "non-zero singular values. Large: some directions of the weights hardly move the head.",
        is_log=True,
    ),
    Quantity(
        key="kappa", label="condition number", family="spectra",
        equation="kappa(W) = sigma_max(W) / sigma_min(W)",
        words="Of a projection matrix. A random head of width D in E dimensions is near "
        "(1 + sqrt(D/E)) / (1 - sqrt(D/E)).",
        is_log=True,
    ),
    Quantity(
        key="spectral norm", label="spectral norm", family="spectra",
        equation="sigma_max(W)", words="The most a projection can stretch a token.", is_log=True,
    ),
    Quantity(
        key="stable rank", label="stable rank", family="spectra",
        equation="sum_i sigma_i^2 / max_i sigma_i^2",
        words="How many directions carry the matrix's energy; 1 is rank collapse.",
    ),
    Quantity(
        key="effective rank", label="effective rank", family="spectra",
        equation="exp(H(sigma / sum_i sigma_i))",
        words="How many singular values count, by their entropy (Roy & Vetterli 2007).",
    ),
    Quantity(
        key="alignment", label="alignment with the identity", family="spectra",
        equation="sum_i W_ii / (||W||_F sqrt(n))",
        words="Cosine of a product with the identity, in [-1, 1]; mimetic initialisation makes "
        "it positive for q k and negative for v o.",
    ),
    Quantity(
        key="rank", label="numerical rank", family="spectra",
        equation="#{i : sigma_i > max(shape) eps sigma_max}",
        words="Singular values that the dtype can tell from zero.",
    ),
    Quantity(
        key="lipschitz", label="Lipschitz bound", family="stability",
        equation="L <= ||W_O|| sum_h (||W_V^h|| + (theta_h / tau) Phi_h)",
        words="The most the attention's output can move for a change of its input, "
        "in the largest token RMS norm.", is_log=True,
    ),
    Quantity(
        key="contraction", label="LayerNorm contraction", family="stability",
        equation="||gamma||_inf / sigma <= c < 1",
        words="A post-LN layer below 1 shrinks gradients; over layers the product vanishes.",
        is_log=True,
    ),
)  # fmt: skip
"""The longest key whose words all stand in a metric's name, in order, describes it."""

_WHOLE_NAMES = {entry.key.replace(" ", "_") for entry in QUANTITIES}  # "p_max" is no maximum


def split_statistic(metric: str) -> tuple[str, str]:
    """Part a name into its quantity and what was taken over the rows.

    Args:
        metric: For example ``"entropy_nats_q50"``.

    Returns:
        ``("entropy_nats", "q50")``; the second is "" where nothing was taken.
    """
    found = _STATISTIC.search(metric)
    if found is None or metric in _WHOLE_NAMES:
        return metric, ""
    return metric[: found.start()], found.group(1)


def quantity_of(metric: str) -> Quantity:
    """Find what describes a metric.

    Args:
        metric: Its name.

    Returns:
        The entry, or one of the family "other" that knows the name only.
    """
    words = re.split(r"[^A-Za-z0-9]+", metric.lower())
    matching = [entry for entry in QUANTITIES if _stands_in(entry.key.split(), words)]
    if matching:
        return max(matching, key=lambda entry: (len(entry.key.split()), len(entry.key)))
    base = split_statistic(metric)[0]
    return Quantity(key=base, label=base.replace("_", " "), family="other", equation="", words="")


def _stands_in(wanted: list[str], words: list[str]) -> bool:
    rest = iter(words)
    return all(word in rest for word in wanted)
