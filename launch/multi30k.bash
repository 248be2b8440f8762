# A function of scripts that translate Multi30k, which source this file.

# shellcheck shell=bash
link_multi30k() { # DATA DIRECTORY: link the captions by the names that --task translation reads; test is that of 2016
  local from=$1/translation/multi30k to=$2 language part
  mkdir -p "$to"
  for language in en de; do
    for part in train val; do
      ln -sf "$(realpath "$from/$part.$language")" "$to/$part.$language"
    done
    ln -sf "$(realpath "$from/test_2016_flickr.$language")" "$to/test.$language"
  done
}
