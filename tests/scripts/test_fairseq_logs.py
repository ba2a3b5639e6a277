"""The log of a training gives its points, also of one that was resumed."""

from studies.fairseq_logs import Progress


def inner(update, loss="2.0"):
    return (
        f'x | INFO | train_inner | {{"loss": "9", "nll_loss": "{loss}", "wpb": "100", '
        f'"num_updates": "{update}"}}\n'
    )


def valid(update, loss):
    return (
        f'x | INFO | valid | {{"epoch": 1, "valid_loss": "{loss}", "valid_num_updates": '
        f'"{update}"}}\n'
    )


START = "x | INFO | fairseq_cli.train | Start iterating over samples\n"
BEGIN = 'x | INFO | fairseq_cli.train | begin validation on "valid" subset\n'


def test_points_have_tokens_and_the_cpu_seconds_of_updates_alone():
    progress = Progress([])
    for cpu, line in [
        (9, START),
        (11, inner(10)),
        (14, BEGIN),
        (17, valid(15, 3.5)),
        (18, inner(20)),
        (19, "other\n"),
    ]:
        progress.read(line, cpu)
    assert progress.all() == [
        {"update": 10, "tokens": 1000, "cpu_seconds": 2.0, "train_loss": 2.0},
        {"update": 15, "tokens": 1500, "cpu_seconds": 5.0, "valid_loss": 3.5},
        {"update": 20, "tokens": 2000, "cpu_seconds": 6.0, "train_loss": 2.0},
    ]


def test_the_smoothed_loss_of_a_validation_is_beside_its_likelihood():
    progress = Progress([])
    progress.read(
        'x | INFO | valid | {"valid_loss": "5.4", "valid_nll_loss": "4.3", "valid_num_updates": '
        '"7"}\n',
        None,
    )
    assert progress.all() == [{"update": 7, "tokens": 0, "valid_loss": 4.3, "valid_objective": 5.4}]


def test_a_resumed_training_drops_the_points_that_it_repeats():
    first = Progress([])
    for cpu, update in ((1, 10), (2, 20), (3, 30)):
        first.read(START if update == 10 else "", 0)
        first.read(inner(update), cpu)
    early = Progress(first.all())
    early.read("killed before it began", 5)
    assert early.all() == first.all()
    second = Progress(early.all())
    for cpu, line in [
        (5, "Loaded checkpoint x.pt (epoch 1 @ 20 updates)"),
        (6, START),
        (8, inner(30, 1.0)),
    ]:
        second.read(line, cpu)
    assert second.all() == [
        *first.points[:2],
        {"update": 30, "tokens": 3000, "cpu_seconds": 4.0, "train_loss": 1.0},
    ]
