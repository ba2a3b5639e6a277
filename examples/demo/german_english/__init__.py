"""A seeded German-English parallel corpus for the translation demo.

Each sentence is built once as a structure (clauses of a subject, a verb and parts) and spelled out twice,
by a German and by an English grammar, so the two sides always mean the same.  The correspondences a model
has to learn are fixed:

* German perfect and preterite are both English simple past; with schon, gerade erst, noch nie, noch nicht
  or a count of times the perfect is the present perfect; the pluperfect is the pluperfect.
* The German present is the simple present with a habit (jeden Tag, oft) or a state, the future with a
  future time, and the progressive otherwise; werden is "will".
* müssen is "have to", können "can", dürfen "be allowed to", wollen "want to", sollen "should",
  möchte "would like to", gern "like to".
* A fronted adverbial stays in front, with a comma from three words on; sentence adverbs (leider) always
  stand in front in English; a fronted German object returns to its English place.
* The weather, während and als with gerade take the past progressive.
* du, ihr and Sie are all "you"; er, sie and es for things are "it".

From the bottom up: ``lexicon`` holds the words; ``german`` and ``english`` inflect them; ``phrases`` and
``clauses`` are the structures, which ``german_clauses`` and ``english_clauses`` put in order; ``nominals``,
``times``, ``activities`` and ``circumstances`` draw them at random; ``sentences`` has a module for each sort
of sentence, and ``generation`` draws from all of them.
"""

from .generation import generate

__all__ = ["generate"]
