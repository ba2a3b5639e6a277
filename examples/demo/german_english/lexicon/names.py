"""Names of people."""

from .entries import word_list

FEMALE_NAMES = word_list("Anna Maria Julia Laura Emma Lena Sophie Clara Nina Eva Katharina Hannah")
MALE_NAMES = word_list("Peter Paul Martin Stefan Daniel Jan David Simon Michael Robert Karl Oliver")
SURNAMES = word_list("Schneider Weber Becker Hoffmann Schäfer Müller Krüger Vogel Lehmann Köhler")
