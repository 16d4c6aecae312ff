#!/usr/bin/env bash
# tools/demo-data.sh: puts the demo's recordings at $CACHE/demo/clips/<language>/….wav, from
# Debian's packages, and says what they are.
#
# Packages are downloaded and unpacked, never installed: this needs no root and changes no system.
# apt checks their signatures.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

packages=()
for language in en es fr it ru; do packages+=("asterisk-core-sounds-$language-wav"); done
clips=$CACHE/demo/clips
key="v1 ${packages[*]}"
if [[ $(cat "$clips/.key" 2>/dev/null) == "$key" ]]; then
    note "$clips is up to date"
    exit
fi
need apt-get "the demo's recordings come from Debian packages: run it on Debian or Ubuntu"
need dpkg-deb "the demo's recordings come from Debian packages: run it on Debian or Ubuntu"
hint="apt must be able to download asterisk-core-sounds-en-wav and its sisters from Debian's main archive; then run the same command again"

work=$CACHE/demo/apt
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
# Our own lists: a fresh machine has none, and only root may update the system's.
private=(-o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache")
quiet=(-qq -o APT::Sandbox::User=root)
cd "$work"
rm -f ./*.deb
note "downloading ${#packages[@]} packages, 98 MB"
if ! apt-get "${quiet[@]}" download "${packages[@]}" 2>/dev/null; then
    apt-get "${quiet[@]}" "${private[@]}" update
    apt-get "${quiet[@]}" "${private[@]}" download "${packages[@]}"
fi
rm -rf unpacked "$clips.new"
for deb in ./*.deb; do dpkg-deb -x "$deb" unpacked; done
mkdir -p "$clips.new"
for folder in unpacked/usr/share/asterisk/sounds/*/; do
    folder=$(basename "$folder")
    # en_US_f_Allison and its sisters: language, country, and who speaks. Recordings of silence have
    # no language.
    mv "unpacked/usr/share/asterisk/sounds/$folder" "$clips.new/${folder%%_*}"
    rm -rf "$clips.new/${folder%%_*}/silence"
done
cp unpacked/usr/share/doc/asterisk-core-sounds-en-wav/copyright "$clips.new/COPYRIGHT"
rm -rf "$clips" unpacked ./*.deb
echo "$key" >"$clips.new/.key"
mv "$clips.new" "$clips"
note "$(find "$clips" -name '*.wav' | wc -l) recordings, $(du -sh --apparent-size "$clips" | cut -f1)"
