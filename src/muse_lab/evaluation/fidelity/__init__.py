"""How far attentions are from exact attention on what the layers of a model attend with."""
