"""Words of the names of needles: those that are one token each, if a tokenizer has enough of them.

A name is a key. If its last word is one token, and in no other name of the document, then that token says which uid
comes next.
"""

from __future__ import annotations

from muse_lab.pretraining.data.tokenizer import Tokenizer

ENOUGH = 100
"""Minimum number of words of one token: fewer make too few names."""


def words_for(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Words of one token, with and without a space before them; if they are too few, words like `amber` instead."""
    plain = tuple(_PLAIN.split())
    words = (*plain, *_OF_PROGRAMMERS.split())
    for before in ("", " "):
        encodings = tokenizer.encode_batch([before + word for word in words], add_special_tokens=False)
        words = tuple(word for word, encoding in zip(words, encodings, strict=True) if len(encoding.ids) == 1)
    return words if len(words) >= ENOUGH else plain


_PLAIN = (
    "amber ancient autumn bitter blazing brave bright broken calm clever coastal copper coral crimson crystal curious "
    "distant dusty eager early emerald endless faded fierce frozen gentle golden hidden hollow humble iron ivory "
    "jagged lively lonely marble mellow misty narrow noble northern olive orange patient polished proud purple quiet "
    "rapid restless royal rustic sandy scarlet secret shady silent silver simple sleepy slender smooth solemn southern "
    "steady stormy sturdy sunny swift tidy velvet violet wandering western wild winter wooden yellow anchor arrow "
    "badger bakery barrel basket beacon bridge bucket button candle canyon castle cellar chapel cherry circle citadel "
    "compass cottage desert dolphin eagle engine falcon feather fiddle forest fountain garden glacier hammer harbour "
    "harvest helmet horizon island jungle kettle ladder lantern library lizard lobster marsh meadow mirror monkey "
    "mountain needle orchard otter paddle palace pebble pepper pigeon pillow planet pocket prairie rabbit ribbon river "
    "rocket saddle salmon shadow shelter spider squirrel stable summit temple thunder timber tunnel turtle valley "
    "village violin walnut window"
)
_OF_PROGRAMMERS = (
    "ability absolute abstract access action activate active actual actually adaptive additional address adjust "
    "advanced ahead algorithm align alive allow alone alter alternative angle annotation answer append application "
    "apply appropriate archive area argument array assign associated atom atomic attach attachment attribute audio "
    "author available average avoid back background backup base basic basis begin bell below best better binary bind "
    "bits black blank block blow body bold book border bottom bound boundary bracket branch breaks browser buffer bugs "
    "build byte cache calculate calendar call callback cancel candidate canvas capital capture card case cast catch "
    "cause cell center chain change channel character check checker child children choice choose chunk classes clean "
    "clear click client clock clone close closure code collect collections color column command comment common compare "
    "comparison compatible compile compiler complete complex component compress compression compute condition "
    "configuration configure confirm conflict conform connect connection console constant construct container content "
    "context control conversion convert cookie copy copyright core correct count counter cover coverage create "
    "critical cross current currently cursor custom cycle dash data date days deal decimal decode decoder deep default "
    "define definition delay delete demand dependent depth derived description destination destroy detach detail "
    "detect determined device dialog dictionary difference different digest digit direct directory disable disk "
    "display distribution divide division domain done double down draft draw drive drop dummy duration dynamic easy "
    "echo edge edit editor effect effective efficient element email embed empty enable encode encoder encoding "
    "endpoint ends ensure enter entity entries entry environment equal equivalent error escape event everything exact "
    "example exception exclude executable execute execution exist exit expand expect export expression extend "
    "extension external extra extract face fact factor factory fail failure fake fall family fast fault feature feed "
    "fetch field file filename fill filter final find finish first flag flash flatten floor flow flush focus folder "
    "follow font force forget form format former forward four fraction frame framework free freeze frequency friend "
    "friendly full fully function functional future gain gather generate generator generic geometry give good grab "
    "graph grave greater grey grid group guess half hand handle handler hard hash head header heading heap height help "
    "helper hide high higher highlight hint history hold home hook horizontal host hour human icon ideal identifier "
    "identity idle ignore image include indent independent index information initial initialize input insert inside "
    "install instance instead integer interaction interface internal intersection invalid inverse issue item iterator "
    "join jump keep kernel keys keyword kind know known label language large last late later latest lazy leader least "
    "leave left legal length less letter level libraries license life light like limit line link list listen listener "
    "little load loader local locale location lock logical login long look lookup loop lower machine magic mail main "
    "major manager manifest mapping margin mark marker mask master match math member memory menu merge message method "
    "minimum minor minus minute missing mixed mock mode module month mouse move multiple multiply name native natural "
    "near nearest necessary need negative nested network next node normal normalize note null number numeric object "
    "official offset open operation operator optimize option optional order ordering origin original other outer "
    "output over overflow override owner pack package packet page pair paragraph parallel parameter parent parse "
    "parser part partial party password paste patch path pattern pause payload peer pending perform performance period "
    "phase phrase pick pickle piece pipe place plain plan plane platform play please plural plus point pointer policy "
    "popular port position positive possible possibly post power precision prefix prepare present press previous prime "
    "printer priority private process processor product profile program prompt property protocol proxy public pull "
    "pure push query question queue quick quit quote race radio random range rate ratio rational read readable reader "
    "ready real reason recall recent record redirect reduce reference region register registry regular relative "
    "release remote remove rename repeat replace reply report repository represent request require reset resolution "
    "resolve resource response rest restore result retry reverse rich right ring root rotate rough round route routine "
    "rows rule runner runtime safe salt sample save scale scan schedule scheme scope score screen script scroll search "
    "second section secure security seek seen segment select selection selector send sensitive separator sequence "
    "serial series server settings setup several share shared shell shift short shot show side sign signal signature "
    "similar single site size skip sleep slice slot slow small smart snapshot socket soft software sort source space "
    "span special specific spin split square squeeze stack stand standard star start state statement static status "
    "step stop store stream strict string strip strong structure study style subject submit subset success sufficient "
    "suffix summary support sure swap symbol system table tail take target task tell template term terminal test text "
    "theme think third thread three threshold through time timeout timer title today together token tool topics total "
    "trace traceback track trade transaction transfer transform transition translate translation transport tree turn "
    "type typically undo union unique unit unknown update upload upper usable usage user username valid validate value "
    "variable variant verbose verify version view viewer virtual visible visit visual wait waiter wake walk wall want "
    "warn warnings watch ways weak week weight wheel white wide widget width wind winner word work worker world wrap "
    "wrapper write writer year zero zone zoom"
)
