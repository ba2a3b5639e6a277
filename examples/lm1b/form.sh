# shellcheck shell=bash
# Choose the form of the text, words or subwords, by the architecture. Source this after recipe.sh.
#   MODEL=baevski         words: Mixhead table 3, adaptive inputs (the default)
#   MODEL=transformer-xl  words: Mixhead table 3
#   MODEL=fixhead         subwords: low-rank bottleneck paper, figure 1

case ${MODEL:=baevski} in
    baevski) default_arch=mixhead_transformer_lm_gbw_512 ;;
    transformer-xl) default_arch=mixhead_transformer_xl_lm1b ;;
    fixhead) default_arch=fixhead_transformer_lm_lm1b ;;
    *) fail "MODEL=$MODEL: must be one of baevski, transformer-xl, fixhead" ;;
esac

form_of() { # ARCHITECTURE
    case $1 in
        *_transformer_lm_lm1b) printf subword ;;
        *) printf word ;;
    esac
}

has_memory() { # ARCHITECTURE: succeed if it reads the text in order, window after window
    [[ $1 == *_transformer_xl* ]]
}
