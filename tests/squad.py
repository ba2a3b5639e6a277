"""Provide a dozen made-up questions in SQuAD's layout, some about a text of several windows."""

import json

from fairseq.data import Dictionary

# Flags of the task and of a model, small enough for what follows.
WINDOWS = {"max_seq_length": 48, "doc_stride": 16, "max_query_length": 24, "max_positions": 64}
SIZES = {
    "encoder_layers": 2,
    "encoder_embed_dim": 32,
    "encoder_ffn_embed_dim": 64,
    "encoder_attention_heads": 4,
}
DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "pooler_dropout": 0.0}

# Each text with its questions and their accepted answers.
TEXTS = {
    "Anna lives in Oslo, near the old harbour. Ben, her brother, lives in Rome.": {
        "Where does Anna live?": ("Oslo",),
        "Where does Ben live?": ("Rome", "in Rome"),
        "Who is Anna's brother?": ("Ben",),
        "What is near Anna's home?": ("the old harbour", "harbour"),
    },
    "The Café  Zürich\topened in 1908;\nits owner was José Ibáñez.": {
        "When did the café open?": ("1908",),
        "Who owned it?": ("José Ibáñez",),
        "What opened in 1908?": ("The Café  Zürich",),
    },
    "On the hill stood a mill. " * 6
    + "Carla bought it for $300 in May. "
    + "Rain fell on the hill. " * 8: {
        "Who bought the mill?": ("Carla",),
        "What did the mill cost?": ("$300",),
        "When was it bought?": ("May", "in May"),
    },
    "東京 is the capital of Japan (日本); 🗻 is a mountain.": {
        "What is the capital?": ("東京",),
        "Which mountain?": ("🗻",),
    },
}


def content():
    """Return the content of a file of SQuAD 1.1."""
    paragraphs = [
        {
            "context": text,
            "qas": [
                {
                    "id": f"{t}-{q}",
                    "question": question,
                    "answers": [
                        {"text": answer, "answer_start": text.index(answer)} for answer in answers
                    ],
                }
                for q, (question, answers) in enumerate(questions.items())
            ],
        }
        for t, (text, questions) in enumerate(TEXTS.items())
    ]
    return {"version": "1.1", "data": [{"title": "made up", "paragraphs": paragraphs}]}


# Whole words of the vocabulary; the others are spelt.
WORDS = (
    "anna bought brother called carla fell harbour hill home lives mill near opened owner rain "
    "stood what when"
)


def vocabulary():
    """Return the characters, as beginnings and as continuations, and a few whole words."""
    text = "".join(TEXTS)
    for questions in TEXTS.values():
        text += "".join(questions)
    pieces = sorted({character for character in text.lower() if not character.isspace()})
    return [
        *pieces,
        *(f"##{piece}" for piece in pieces),
        *WORDS.split(),
        "the",
        "on",
        "in",
        "it",
        "who",
        "##st",
    ]


def dictionary():
    words = Dictionary()
    for piece in vocabulary():
        words.add_symbol(piece)
    return words


def write_data(folder, **sets):
    """Write a folder for --task squad and return it; `sets` give other questions to a set."""
    folder.mkdir(parents=True, exist_ok=True)
    dictionary().save(str(folder / "dict.txt"))
    for name in ("train", "valid"):
        questions = json.dumps(sets.get(name, content()))
        (folder / f"{name}.json").write_text(questions, encoding="utf-8")
    return folder
