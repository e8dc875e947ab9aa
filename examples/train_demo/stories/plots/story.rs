//! A story in the making: sentences are added to it, words drawn for it.

use super::super::random::StoryRandom;
use super::super::words::{
    ADVERBS, ANIMALS, COLORS, COUNTED, Child, ENDINGS, FEELINGS, MATERIALS, NUMBERS, PLACES,
    RELATIVES, SIZES, TIMES, TOYS,
};

/// A story in the making.
pub(super) struct Story<'a> {
    pub(super) random: &'a mut StoryRandom,
    pub(super) text: String,
}

impl Story<'_> {
    pub(super) fn say(&mut self, sentence: &str) {
        if !self.text.is_empty() {
            self.text.push(' ');
        }
        let mut characters = sentence.chars();
        self.text.extend(characters.next().map(|first| first.to_ascii_uppercase()));
        self.text.push_str(characters.as_str());
    }

    /// Says one of several sentences.
    pub(super) fn say_one_of(&mut self, sentences: &[String]) {
        let at = self.random.below(sentences.len());
        self.say(&sentences[at]);
    }

    pub(super) fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.random.below(list.len())]
    }

    /// Two different entries.
    pub(super) fn pick_two<T: Copy>(&mut self, list: &[T]) -> (T, T) {
        let first = self.random.below(list.len());
        let step = 1 + self.random.below(list.len() - 1);
        (list[first], list[(first + step) % list.len()])
    }

    /// Now and then, a sentence that the plot could do without: what can be seen, worn, counted, known or felt.
    pub(super) fn detail(&mut self, child: Child) {
        if !self.random.chance(1, 2) {
            return;
        }
        let Child { name, she, her, hers } = child;
        let animal = self.pick(ANIMALS);
        let (a, kind) = (animal.a, animal.kind);
        let (color, other_color) = self.pick_two(COLORS);
        let (toy, thing) = self.pick_two(TOYS);
        let (adverb, feeling, material) =
            (self.pick(ADVERBS), self.pick(FEELINGS), self.pick(MATERIALS));
        let (size, time, relative) = (self.pick(SIZES), self.pick(TIMES), self.pick(RELATIVES));
        let (count, many) = (NUMBERS[2 + self.random.below(8)], self.pick(COUNTED).1);
        let place = self.pick(PLACES);
        let (the, spot) = (place.the, place.spots[self.random.below(3)]);
        self.say_one_of(&[
            format!("{name} wore a {color} {thing} and felt {feeling}."),
            format!("{a} {} past {her} {adverb}.", animal.moves),
            format!("{hers} {relative} was {feeling}, as always {time}."),
            format!("{she} saw {count} {many} beside a {size} {toy}."),
            format!("The {kind} near {the} {}.", animal.glad),
            format!("Everyone knows that {a} lives {} and eats {}.", animal.lives, animal.eats),
            format!(
                "{name} thought of the {toy} of {material} that {hers} {relative} had made {time}."
            ),
            format!("\"I like {color} better than {other_color},\" said {name} {adverb}."),
            format!(
                "A {size} {color} {thing} lay on the ground, and {she} stepped over it {adverb}."
            ),
            format!("{hers} {relative} waved {adverb} from {the}."),
            format!("{time}, {name} is never {feeling}."),
            format!("{she} counted {count} {color} {many} {spot}."),
        ]);
    }

    pub(super) fn ending(&mut self) {
        let ending = self.pick(ENDINGS);
        self.say(ending);
    }
}
