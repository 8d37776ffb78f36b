// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package fakeapi serves the objects of Kubernetes' own APIs over HTTP. A driver can use it as its API server. It has
// resource versions, watches, conflicts, and server-side apply, but no validation, no authorization, and no
// controllers. Tests can change or refuse requests.
package fakeapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/applyconfigurations"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
	"sigs.k8s.io/yaml"
)

// Server is a fake API server.
type Server struct {
	// URL is the server's base URL.
	URL string

	http      *httptest.Server
	intercept atomic.Pointer[Interceptor]
	observer  atomic.Pointer[Observer]

	mu       sync.Mutex
	trackers map[string]clienttesting.ObjectTracker // by API group
	revision int64
	versions map[key]int64 // resource versions of the objects
	events   []event       // all changes since the start
	changed  chan struct{} // closed at each change
}

// Interceptor sees every request except watches before it is processed. It may change the written object, which is nil
// for other requests. The client gets the error, an apierrors.APIStatus, as the response; ErrUnreachable breaks the
// connection.
type Interceptor func(r *http.Request, object runtime.Object) error

// Observer sees every request except watches after it was processed, with its body and the error
// of the response.
type Observer func(r *http.Request, body []byte, err error)

// ErrUnreachable is the error of an Interceptor that breaks the connection.
var ErrUnreachable = errors.New("the API server is not reachable")

type key struct {
	resource        schema.GroupVersionResource
	namespace, name string
}

type event struct {
	revision int64
	kind     string
	key      key
	object   runtime.Object
}

// New starts a server with objects. The caller must call Close.
func New(objects ...runtime.Object) (*Server, error) {
	trackers, err := newTrackers()
	if err != nil {
		return nil, err
	}
	s := &Server{trackers: trackers, versions: map[key]int64{}, changed: make(chan struct{})}
	for _, o := range objects {
		kinds, _, err := scheme.Scheme.ObjectKinds(o)
		if err != nil {
			return nil, err
		}
		resource, _ := meta.UnsafeGuessKindToResource(kinds[0])
		named, err := meta.Accessor(o)
		if err != nil {
			return nil, err
		}
		if _, err := s.create(key{resource, named.GetNamespace(), ""}, o); err != nil {
			return nil, err
		}
	}
	s.http = httptest.NewServer(s)
	s.URL = s.http.URL
	return s, nil
}

// newTrackers returns a tracker for each API group. For each write, a tracker makes a REST mapper of
// all kinds of its scheme, which takes milliseconds with the kinds of all groups.
func newTrackers() (map[string]clienttesting.ObjectTracker, error) {
	schemes := map[string]*runtime.Scheme{}
	for kind := range scheme.Scheme.AllKnownTypes() {
		object, err := scheme.Scheme.New(kind)
		if err != nil {
			return nil, err
		}
		if schemes[kind.Group] == nil {
			schemes[kind.Group] = runtime.NewScheme()
		}
		schemes[kind.Group].AddKnownTypeWithName(kind, object)
	}
	decoder := serializer.NewCodecFactory(scheme.Scheme).UniversalDecoder()
	converter := applyconfigurations.NewTypeConverter(scheme.Scheme)
	trackers := map[string]clienttesting.ObjectTracker{}
	for group, kinds := range schemes {
		trackers[group] = clienttesting.NewFieldManagedObjectTracker(kinds, decoder, converter)
	}
	return trackers, nil
}

// Close closes all connections and stops the server.
func (s *Server) Close() {
	s.http.CloseClientConnections()
	s.http.Close()
}

// Config returns the configuration of a client.
func (s *Server) Config() *rest.Config { return &rest.Config{Host: s.URL, QPS: -1} }

// Kubeconfig returns the content of a kubeconfig file for the server.
func (s *Server) Kubeconfig() string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: fake, cluster: {server: %q}}]
users: [{name: fake, user: {}}]
contexts: [{name: fake, context: {cluster: fake, user: fake}}]
current-context: fake
`, s.URL)
}

// Intercept lets f see all later requests. A nil f sees none.
func (s *Server) Intercept(f Interceptor) { s.intercept.Store(&f) }

// Observe lets f see all later requests.
func (s *Server) Observe(f Observer) { s.observer.Store(&f) }

// Revision returns the revision of the newest change.
func (s *Server) Revision() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.revision
}

// RevisionOf returns the revision of the newest change of a resource.
func (s *Server) RevisionOf(resource string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range slices.Backward(s.events) {
		if e.key.resource.Resource == resource {
			return e.revision
		}
	}
	return 0
}

// Change is a change of an object.
type Change struct {
	// Type is ADDED, MODIFIED, or DELETED.
	Type   string
	Object runtime.Object
}

// Changes returns the changes of a resource after a revision, the oldest first.
func (s *Server) Changes(resource string, after int64) (all []Change) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.events {
		if e.revision > after && e.key.resource.Resource == resource {
			all = append(all, Change{e.kind, e.object.DeepCopyObject()})
		}
	}
	return all
}

// target is the object or collection that a request's path names.
type target struct {
	key
	kind        schema.GroupVersionKind
	subresource string
}

// parse returns the target of a path. It reports whether the scheme has the resource.
func parse(path string) (t target, ok bool) {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	if len(parts) < 3 || parts[0] == "apis" && len(parts) < 4 {
		return t, false
	}
	if parts[0] == "apis" {
		t.resource.Group, t.resource.Version, parts = parts[1], parts[2], parts[3:]
	} else {
		t.resource.Version, parts = parts[1], parts[2:]
	}
	if parts[0] == "namespaces" && len(parts) > 2 {
		t.namespace, parts = parts[1], parts[2:]
	}
	parts = append(parts, "", "")
	t.resource.Resource, t.name, t.subresource = parts[0], parts[1], parts[2]
	for name := range scheme.Scheme.KnownTypes(t.resource.GroupVersion()) {
		kind := t.resource.GroupVersion().WithKind(name)
		if plural, _ := meta.UnsafeGuessKindToResource(kind); plural == t.resource {
			t.kind = kind
			return t, scheme.Scheme.Recognizes(t.resource.GroupVersion().WithKind(name + "List"))
		}
	}
	return t, false
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/version" {
		_, _ = io.WriteString(w, `{"major":"1","minor":"37","gitVersion":"v1.37.1"}`)
		return
	}
	t, ok := parse(r.URL.Path)
	if !ok {
		writeError(w, apierrors.NewNotFound(schema.GroupResource{}, r.URL.Path))
		return
	}
	if watch := r.URL.Query().Get("watch"); watch == "true" || watch == "1" {
		if err := s.intercepted(r, nil); err != nil {
			writeError(w, err)
			return
		}
		s.watch(w, r, t)
		return
	}
	object, err := s.do(r, t)
	if err != nil {
		writeError(w, err)
		return
	}
	raw, err := encode(object, t.kind.GroupVersion())
	if err != nil {
		writeError(w, err)
		return
	}
	w.Header().Set("Content-Type", runtime.ContentTypeJSON)
	_, _ = w.Write(raw) //nolint:gosec // the clients are drivers, not browsers
}

func (s *Server) intercepted(r *http.Request, o runtime.Object) error {
	if f := s.intercept.Load(); f != nil && *f != nil {
		return (*f)(r, o)
	}
	return nil
}

// do performs a request other than a watch and returns the object to send.
func (s *Server) do(r *http.Request, t target) (runtime.Object, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	result, err := s.process(r, t, body)
	if f := s.observer.Load(); f != nil {
		(*f)(r, body, err)
	}
	return result, err
}

func (s *Server) process(r *http.Request, t target, body []byte) (_ runtime.Object, err error) {
	var object runtime.Object
	if r.Method == http.MethodPost || r.Method == http.MethodPut {
		if object, _, err = scheme.Codecs.UniversalDeserializer().Decode(body, &t.kind, nil); err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
	}
	if err := s.intercepted(r, object); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch r.Method {
	case http.MethodGet:
		if t.name == "" {
			return s.list(r, t)
		}
		return s.get(t.key)
	case http.MethodPost:
		return s.create(t.key, object)
	case http.MethodPut:
		return s.update(t, object)
	case http.MethodPatch:
		return s.patch(r, t, body)
	case http.MethodDelete:
		return s.delete(t, body)
	}
	return nil, apierrors.NewMethodNotSupported(t.resource.GroupResource(), r.Method)
}

func (s *Server) get(k key) (runtime.Object, error) {
	o, err := s.trackers[k.resource.Group].Get(k.resource, k.namespace, k.name)
	if err != nil {
		return nil, err
	}
	return s.versioned(k, o)
}

// versioned returns a copy of an object with its resource version.
func (s *Server) versioned(k key, o runtime.Object) (runtime.Object, error) {
	o = o.DeepCopyObject()
	named, err := meta.Accessor(o)
	if err != nil {
		return nil, err
	}
	k.namespace, k.name = named.GetNamespace(), named.GetName()
	named.SetResourceVersion(strconv.FormatInt(s.versions[k], 10))
	return o, nil
}

// record assigns a new resource version to an object that was written.
func (s *Server) record(kind string, k key) (runtime.Object, error) {
	s.revision++
	s.versions[k] = s.revision
	o, err := s.get(k)
	if err != nil {
		return nil, err
	}
	s.announce(event{s.revision, kind, k, o})
	return o, nil
}

func (s *Server) announce(e event) {
	s.events = append(s.events, e)
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *Server) create(k key, o runtime.Object) (runtime.Object, error) {
	named, err := meta.Accessor(o)
	if err != nil {
		return nil, err
	}
	if named.GetName() == "" {
		named.SetName(named.GetGenerateName() + string(uuid.NewUUID())[:8])
	}
	if k.namespace != "" {
		named.SetNamespace(k.namespace)
	}
	named.SetUID(uuid.NewUUID())
	named.SetCreationTimestamp(metav1.Time{Time: time.Now().Truncate(time.Second)})
	k.namespace, k.name = named.GetNamespace(), named.GetName()
	if err := s.trackers[k.resource.Group].Create(k.resource, o, k.namespace); err != nil {
		return nil, err
	}
	return s.record("ADDED", k)
}

func (s *Server) update(t target, o runtime.Object) (runtime.Object, error) {
	old, err := s.get(t.key)
	if err != nil {
		return nil, err
	}
	named, err := meta.Accessor(o)
	if err != nil {
		return nil, err
	}
	before, err := meta.Accessor(old)
	if err != nil {
		return nil, err
	}
	if v := named.GetResourceVersion(); v != "" && v != before.GetResourceVersion() {
		return nil, apierrors.NewConflict(t.resource.GroupResource(), t.name, fmt.Errorf("the object has been modified"))
	}
	named.SetUID(before.GetUID())
	named.SetNamespace(t.namespace)
	if err := s.trackers[t.resource.Group].Update(t.resource, o, t.namespace); err != nil {
		return nil, err
	}
	return s.record("MODIFIED", t.key)
}

func (s *Server) patch(r *http.Request, t target, body []byte) (runtime.Object, error) {
	kind := types.PatchType(strings.Split(r.Header.Get("Content-Type"), ";")[0])
	force := r.URL.Query().Get("force") == "true"
	old, err := s.get(t.key)
	if err != nil && (kind != types.ApplyYAMLPatchType || t.subresource != "" || !apierrors.IsNotFound(err)) {
		return nil, err
	}
	existed := err == nil
	var precondition metav1.PartialObjectMetadata
	if existed && yaml.Unmarshal(body, &precondition) == nil && precondition.UID != "" {
		if named, err := meta.Accessor(old); err != nil || named.GetUID() != precondition.UID {
			return nil, apierrors.NewConflict(t.resource.GroupResource(), t.name, errors.New("the UID differs"))
		}
	}
	action := clienttesting.NewPatchSubresourceActionWithOptions(t.resource, t.namespace, t.name, kind, body,
		metav1.PatchOptions{FieldManager: r.URL.Query().Get("fieldManager"), Force: &force}, t.subresource)
	if _, _, err := clienttesting.ObjectReaction(s.trackers[t.resource.Group])(action); err != nil {
		return nil, err
	}
	if !existed {
		return s.record("ADDED", t.key)
	}
	return s.record("MODIFIED", t.key)
}

func (s *Server) delete(t target, body []byte) (runtime.Object, error) {
	old, err := s.get(t.key)
	if err != nil {
		return nil, err
	}
	var options metav1.DeleteOptions
	_ = json.Unmarshal(body, &options) // the body is optional, and may be protobuf
	named, err := meta.Accessor(old)
	if err != nil {
		return nil, err
	}
	if p := options.Preconditions; p != nil && p.UID != nil && *p.UID != named.GetUID() {
		return nil, apierrors.NewConflict(t.resource.GroupResource(), t.name, fmt.Errorf("the UID differs"))
	}
	if err := s.trackers[t.resource.Group].Delete(t.resource, t.namespace, t.name); err != nil {
		return nil, err
	}
	s.revision++
	delete(s.versions, t.key)
	named.SetResourceVersion(strconv.FormatInt(s.revision, 10))
	s.announce(event{s.revision, "DELETED", t.key, old})
	return &metav1.Status{Status: metav1.StatusSuccess}, nil
}

// all returns the objects of a collection that match a field selector.
func (s *Server) all(r *http.Request, t target) (objects []runtime.Object, list runtime.Object, err error) {
	list, err = s.trackers[t.resource.Group].List(t.resource, t.kind, t.namespace)
	if err != nil {
		return nil, nil, err
	}
	items, err := meta.ExtractList(list)
	if err != nil {
		return nil, nil, err
	}
	for _, item := range items {
		o, err := s.versioned(t.key, item)
		if err != nil {
			return nil, nil, err
		}
		if matches(r, o) {
			objects = append(objects, o)
		}
	}
	return objects, list, nil
}

func (s *Server) list(r *http.Request, t target) (runtime.Object, error) {
	objects, list, err := s.all(r, t)
	if err != nil {
		return nil, err
	}
	list = list.DeepCopyObject()
	if err := meta.SetList(list, objects); err != nil {
		return nil, err
	}
	l, err := meta.ListAccessor(list)
	if err != nil {
		return nil, err
	}
	l.SetResourceVersion(strconv.FormatInt(s.revision, 10))
	return list, nil
}

// matches reports whether an object matches the field selector of a request. The selector
// has paths in the object's JSON form.
func matches(r *http.Request, o runtime.Object) bool {
	selector, err := fields.ParseSelector(r.URL.Query().Get("fieldSelector"))
	if err != nil || selector.Empty() {
		return err == nil
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	if err != nil {
		return false
	}
	set := fields.Set{}
	for _, q := range selector.Requirements() {
		var at any = content
		for part := range strings.SplitSeq(q.Field, ".") {
			m, _ := at.(map[string]any)
			at = m[part]
		}
		if at != nil {
			set[q.Field] = fmt.Sprint(at)
		}
	}
	return selector.Matches(set)
}

// watch streams events until the client disconnects.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, t target) {
	w.Header().Set("Content-Type", runtime.ContentTypeJSON)
	flusher, _ := w.(http.Flusher)
	send := func(kind string, o runtime.Object) bool {
		raw, err := encode(o, t.kind.GroupVersion())
		if err != nil {
			return false
		}
		err = json.NewEncoder(w).Encode(metav1.WatchEvent{Type: kind, Object: runtime.RawExtension{Raw: raw}})
		flusher.Flush()
		return err == nil
	}
	query := r.URL.Query()
	after, err := strconv.ParseInt(query.Get("resourceVersion"), 10, 64)
	if initial := query.Get("sendInitialEvents") == "true"; initial || err != nil || after == 0 {
		s.mu.Lock()
		objects, _, err := s.all(r, t)
		after = s.revision
		s.mu.Unlock()
		for _, o := range objects {
			if err != nil || !send("ADDED", o) {
				return
			}
		}
		if initial && !send("BOOKMARK", bookmark(t.kind, after)) {
			return
		}
	}
	flusher.Flush()
	for {
		s.mu.Lock()
		changed, events := s.changed, s.events
		s.mu.Unlock()
		for _, e := range events {
			if e.revision <= after {
				continue
			}
			after = e.revision
			wanted := e.key.resource == t.resource && (t.namespace == "" || t.namespace == e.key.namespace)
			if wanted && matches(r, e.object) && !send(e.kind, e.object) {
				return
			}
		}
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}

// bookmark returns the object that ends the initial events of a watch.
func bookmark(kind schema.GroupVersionKind, revision int64) runtime.Object {
	o, err := scheme.Scheme.New(kind)
	if err != nil {
		return &metav1.Status{}
	}
	if named, err := meta.Accessor(o); err == nil {
		named.SetResourceVersion(strconv.FormatInt(revision, 10))
		named.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	}
	return o
}

// encode returns an object as JSON. It encodes a copy: the codec sets the kind of the object for a time, while other
// requests read it.
func encode(object runtime.Object, gv schema.GroupVersion) ([]byte, error) {
	if status, ok := object.(*metav1.Status); ok {
		return json.Marshal(status)
	}
	return runtime.Encode(scheme.Codecs.LegacyCodec(gv), object.DeepCopyObject())
}

func writeError(w http.ResponseWriter, err error) {
	if errors.Is(err, ErrUnreachable) {
		panic(http.ErrAbortHandler) // net/http closes the connection without a response
	}
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		status = apierrors.NewInternalError(err)
	}
	s := status.Status()
	s.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
	w.Header().Set("Content-Type", runtime.ContentTypeJSON)
	w.WriteHeader(int(s.Code))
	_ = json.NewEncoder(w).Encode(s)
}
