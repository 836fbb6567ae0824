"""Parts: small modules that each own one stage of attention, in its fused and its plain form.

A part holds the parameters of its method and nothing of the host. The slots and what they ask:

    projections  project(which, hidden_states, weight, bias) -> projected
    norm         prepare(query, key) -> query, key;   score_scale(scale) -> scale
    cap          cap(scores) -> scores
    normaliser   fused(query, key, value, mask, scale, dropout_p) -> attn_output
                 plain(scores) -> attn_weights
    weights      coefficients(hidden_states, token_mask) -> alpha, its running mean
                 fused(attn_output, value, mask, *coefficients) -> attn_output
                 plain(attn_weights, mask, *coefficients) -> attn_weights
    output       forward(attn_output, hidden_states) -> attn_output
"""
