"""Classification: which label, or which labels, a text has.

    columns ─▶ text, and the label as it stands (rows/labels.py)
      labels of all rows, sorted ─▶ plan.json ─▶ the task ─▶ id2label of the model in the store
    text ─▶ tokens (side `input`); label ─▶ its number (side `target`: one, or of `multi_label` any number of them)
    rows ─▶ padded at their ends, with a mask where one is padded ─▶ logits ─▶ loss, summed over rows

*check* takes the labels from the first rows, to plan with; *prepare* takes them from all rows, before it encodes any.
So numbers do not depend on which process encodes which block. A model without a head gets one when it is converted for
the store: what training loads is complete.
"""
