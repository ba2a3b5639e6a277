"""Register BERT's architectures, tasks and criteria for the tests of this folder."""

import bert

bert.register()
