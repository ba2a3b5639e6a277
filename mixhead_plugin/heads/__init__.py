"""What people do with the heads of any model: weigh, leave out, cut and look.

It needs torch alone, and numpy and matplotlib for pictures.

| module | holds |
|---|---|
| `attention` | the protocol: what an attention of any model has to offer |
| `assembly_attention` | its adapter for the attentions that this package builds |
| `hooked_attention` | what that adapter shares with those whose parts lie elsewhere |
| `sites` | where an attention is in its model, by its name |
| `gates`, `views` | what acts while a call lasts: factors on heads, and those who look |
| `uncompiled` | switches of the whole process that are off while that lasts |
| `importance`, `ablation` | weigh heads, leave heads out |
| `choosing`, `cutting` | name and choose heads, cut them off |
| `spectrum`, `spectrum_figures` | how many dimensions P has |
| `mixing_statistics`, `mixing_figures` | how far M is from the identity |
| `numbers`, `correlation` | a number for each head: table, JSON, pictures |
| `figures`, `page`, `text` | the style of pictures; one HTML page; a text for it |
"""
